"""What makes a member fast in its place: decided here, from what it is and where it goes.

Only a target's bits reach a caller, so its dtype is the checkpoint's where the CPU computes in it.
Pure; the model applies it (`PackedModel.wrap`).
"""

from collections.abc import Callable
from dataclasses import dataclass

from modelpool.attention.backend import SDPA, AttentionBackend
from modelpool.config import Dtype, KeptWeights, ModelConfig
from modelpool.fast.thread_choice import OtherPrograms

HALF = ("bfloat16", "float16")
_FLOAT32_BELOW = 8_000_000  # parameters; in bfloat16 a small model waits for conversions
_ONE_THREAD_BELOW = 4_000_000  # parameters; small layers lose by a second thread


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How a loaded model is run. By default nothing is touched.

    Attributes:
        threads: CPU threads of its forwards; None for torch's setting when it is wrapped.
        pack_weights: lay out linear weights once where that pays (`packed_linear`).
        lean: the short way through a decoder (`lean_forward`), or one call per RMSNorm
            (`lean_norm`) in the others.
        attention: the kernels that attend.
        weights: `int8`: linear layers are quantised once the model is loaded (`fast.int8`).
        others: it may have one thread while these use the cores (`thread_choice`).
        is_target: its bits reach texts, so that it may do so only where they stay.
    """

    threads: int | None = None
    pack_weights: bool = False
    lean: bool = False
    attention: AttentionBackend = SDPA
    weights: KeptWeights = "plain"
    others: OtherPrograms | None = None
    is_target: bool = False


PLAIN = Tuning()


@dataclass(frozen=True, kw_only=True)
class Role:
    """A member's size, the dtype that it computes in, and its part in the pool."""

    parameter_count: int
    dtype: str
    is_quantized: bool
    is_target: bool
    on_cpu: bool
    weights: KeptWeights = "plain"

    @property
    def is_cpu_drafter(self) -> bool:
        return self.on_cpu and not self.is_target


def dtype_for(config: ModelConfig, role: Role, computes_in: Callable[[str], bool]) -> Dtype:
    """What `dtype: auto` means: float32 for a half precision on a CPU where that is faster.

    It is for a small drafter, and for any member whose dtype the CPU has no kernels for
    (`modelpool.fast.cpu.computes_in`).
    """
    if config.dtype != "auto" or not role.on_cpu or role.is_quantized or role.dtype not in HALF:
        return config.dtype
    is_small_drafter = not role.is_target and role.parameter_count < _FLOAT32_BELOW
    if is_small_drafter or not computes_in(role.dtype):
        return "float32"
    return "auto"


def is_lean(role: Role) -> bool:
    return role.is_cpu_drafter and role.weights == "plain"


def tuning_for(
    config: ModelConfig,
    role: Role,
    *,
    default_threads: int,
    pack_weights: bool,
    attention: AttentionBackend = SDPA,
    others: OtherPrograms | None = None,
) -> Tuning:
    """How a member is run. `default_threads`: torch's setting."""
    is_small = role.parameter_count < _ONE_THREAD_BELOW
    suited = 1 if role.is_cpu_drafter and is_small else default_threads
    return Tuning(
        threads=config.threads or suited,
        pack_weights=pack_weights,
        lean=is_lean(role),
        attention=attention,
        weights=role.weights,
        others=others if role.on_cpu else None,
        is_target=role.is_target,
    )
