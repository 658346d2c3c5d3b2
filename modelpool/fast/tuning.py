"""What makes a member fast in its place: decided here, from what it is and where it goes.

Only a target's bits reach a caller, so its dtype is the checkpoint's where the CPU computes in it.
Pure; the model applies it (`PackedModel.wrap`).
"""

from collections.abc import Callable
from dataclasses import dataclass

from modelpool.attention.backend import PATH, AttentionBackend
from modelpool.checkpoint.footprint import CheckpointFacts
from modelpool.config import Dtype, KeptWeights, ModelConfig
from modelpool.fast.thread_choice import OtherPrograms

_HALF = ("bfloat16", "float16")
_FLOAT32_BELOW = 8_000_000  # parameters; in bfloat16 a small model waits for conversions
_ONE_THREAD_BELOW = 4_000_000  # parameters; small layers lose by a second thread


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How a loaded model is run. By default nothing is touched.

    Attributes:
        threads: CPU threads of its forwards; None for torch's setting when it is wrapped.
        pack_weights: lay out linear weights once where that pays (`fast.linear`).
        lean: the short way through a decoder (`lean_forward`), or one call per RMSNorm
            (`lean_norm`) in the others.
        attention: the kernels that attend.
        weights: `int8`, `int4`: linear layers are quantised once the model is loaded
            (`fast.quantised`).
        others: it may have one thread while these use the cores (`thread_choice`).
        is_target: its bits reach texts, so that it may do so only where they stay.
    """

    threads: int | None = None
    pack_weights: bool = False
    lean: bool = False
    attention: AttentionBackend = PATH
    weights: KeptWeights = "plain"
    others: OtherPrograms | None = None
    is_target: bool = False


PLAIN = Tuning()


def dtype_for(
    config: ModelConfig, facts: CheckpointFacts, is_target: bool, computes_in: Callable[[str], bool]
) -> Dtype:
    """What `dtype: auto` means on a CPU: float32 for a half precision where that is faster.

    It is for a small drafter, and for any member whose dtype the CPU has no kernels for
    (`modelpool.fast.cpu.computes_in`).
    """
    if config.dtype != "auto" or facts.is_quantized or facts.dtype not in _HALF:
        return config.dtype
    is_small_drafter = not is_target and facts.parameter_count < _FLOAT32_BELOW
    return "float32" if is_small_drafter or not computes_in(facts.dtype) else "auto"


def is_lean(facts: CheckpointFacts, *, is_target: bool, on_cpu: bool) -> bool:
    return on_cpu and not is_target and facts.weights == "plain"


def tuning_for(
    config: ModelConfig,
    facts: CheckpointFacts,
    *,
    is_target: bool,
    on_cpu: bool,
    default_threads: int,
    pack_weights: bool,
    attention: AttentionBackend = PATH,
    others: OtherPrograms | None = None,
) -> Tuning:
    """How a member is run. `default_threads`: torch's setting."""
    is_cpu_drafter = on_cpu and not is_target
    is_small = facts.parameter_count < _ONE_THREAD_BELOW
    return Tuning(
        threads=config.threads or (1 if is_cpu_drafter and is_small else default_threads),
        pack_weights=pack_weights,
        lean=is_lean(facts, is_target=is_target, on_cpu=on_cpu),
        attention=attention,
        weights=facts.weights,
        others=others if on_cpu else None,
        is_target=is_target,
    )
