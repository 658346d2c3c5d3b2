"""Tuning: how a model is run fast, decided from its checkpoint, its role and its device.

Only a target's bits reach a caller, so its dtype is the checkpoint's if the CPU computes in it.
This module is pure; the model applies the result (`PackedModel.wrap`).
"""

from collections.abc import Callable
from dataclasses import dataclass

from modelpool.attention.backend import PATH, AttentionBackend
from modelpool.checkpoint.footprint import CheckpointFacts
from modelpool.config import Dtype, KeptWeights, ModelConfig
from modelpool.fast.thread_choice import OtherPrograms

_HALF = ("bfloat16", "float16")
_FLOAT32_BELOW = 8_000_000  # parameters; conversions slow a small model down in bfloat16
_ONE_THREAD_BELOW = 4_000_000  # parameters; a second thread slows small layers down


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Settings for running a loaded model; by default nothing is changed.

    Attributes:
        threads: CPU threads of its forwards; None for torch's setting when it is wrapped.
        pack_weights: lay out linear weights once where that pays (`fast.linear`).
        lean: use a lean forward for decoders (`lean_forward`), or one call per RMSNorm
            (`lean_norm`) for other models.
        attention: the attention kernels.
        kv_dtype: dtype of keys and values, if not the model's.
        weights: `int8`, `int4`: linear layers are quantised once the model is loaded
            (`fast.quantised`).
        others: the model may have one thread while these use the cores (`thread_choice`).
        is_target: its bits reach texts, so it may have one thread only if that keeps them.
    """

    threads: int | None = None
    pack_weights: bool = False
    lean: bool = False
    attention: AttentionBackend = PATH
    kv_dtype: str | None = None
    weights: KeptWeights = "plain"
    others: OtherPrograms | None = None
    is_target: bool = False


PLAIN = Tuning()


def dtype_for(
    config: ModelConfig, facts: CheckpointFacts, is_target: bool, computes_in: Callable[[str], bool]
) -> Dtype:
    """Return the dtype for `dtype: auto` on a CPU: float32 if half precision is slower.

    That is so for a small drafter, and for any model whose dtype the CPU has no kernels for
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
    """Return the settings of a model; `default_threads` is torch's setting."""
    is_cpu_drafter = on_cpu and not is_target
    is_small = facts.parameter_count < _ONE_THREAD_BELOW
    return Tuning(
        threads=config.threads or (1 if is_cpu_drafter and is_small else default_threads),
        pack_weights=pack_weights,
        lean=is_lean(facts, is_target=is_target, on_cpu=on_cpu),
        attention=attention,
        kv_dtype=facts.kv_dtype if on_cpu else None,
        weights=facts.weights,
        others=others if on_cpu else None,
        is_target=is_target,
    )
