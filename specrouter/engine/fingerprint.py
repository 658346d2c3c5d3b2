"""What a text depends on, as a fingerprint: the target, its dtype and weights, and this version."""

import hashlib

from modelpool import ModelPool
from modelpool.attention.path_cpu import attention_arithmetic
from modelpool.config import PoolConfig
from modelpool.fast.compiled_layers import layer_arithmetic
from modelpool.fast.quantised import ARITHMETIC
from modelpool.kernels.recurrence import matrix_kernels
from processors import noise
from specrouter.version import __version__

_VARIES = "_varies"


def with_bits(fingerprint: str, pool: ModelPool) -> str:
    """The same with what a trial of the target has found, once it is loaded: whether texts may
    also depend on what is computed beside them."""
    return fingerprint + _VARIES if pool.bits_depend_on is not None else fingerprint


def fingerprint_of(config: PoolConfig, pool: ModelPool) -> str:
    """Not of drafters, nor of how they are used: texts do not depend on them."""
    target = next(model for model in config.models if model.name == config.target)
    plan = pool.plan(config.target)  # "auto" may be another on another machine, and int8 refused
    placeless = target.model_dump_json(exclude={"device"})
    facts = [__version__, plan.dtype, plan.weights, placeless, f"noise {noise.ARITHMETIC}"]
    if plan.weights in ("int8", "int4"):
        facts.append(f"quantised {ARITHMETIC} {layer_arithmetic()}")
    if plan.placement.is_on_cpu:
        facts.append(f"attention {attention_arithmetic()}")
    if plan.is_recurrent and plan.placement.is_on_cpu:
        facts.append("C library" if matrix_kernels() else "torch")
    digest = hashlib.sha256(" ".join(facts).encode())
    return f"fp_{digest.hexdigest()[:12]}"
