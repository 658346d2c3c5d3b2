"""What a text depends on, as a fingerprint: the target, its dtype and weights, and this version."""

import hashlib
from pathlib import Path

from modelpool import ModelPool
from modelpool.attention.path_cpu import attention_arithmetic
from modelpool.config import ModelConfig, PoolConfig
from modelpool.fast.compiled_layers import layer_arithmetic
from modelpool.fast.quantised import ARITHMETIC
from modelpool.kernels.recurrence import matrix_kernels
from processors import noise
from specrouter.request.receipt import OF_NUMBERS, ServedModel
from specrouter.version import __version__

_VARIES = "_varies"


def with_bits(fingerprint: str, pool: ModelPool) -> str:
    """The same with what a trial of the target has found, once it is loaded: whether texts may
    also depend on what is computed beside them."""
    return fingerprint + _VARIES if pool.bits_depend_on is not None else fingerprint


def fingerprint_of(config: PoolConfig, pool: ModelPool) -> str:
    """Not of drafters, nor of how they are used: texts do not depend on them."""
    placeless = _target(config).model_dump_json(exclude={"device"})
    facts = (__version__, placeless, *_arithmetic(config, pool))
    digest = hashlib.sha256(" ".join(facts).encode())
    return f"fp_{digest.hexdigest()[:12]}"


def served_model(config: PoolConfig, pool: ModelPool) -> ServedModel:
    """What a receipt says of the target. Reads its files, a second or two for each gigabyte.

    Raises `ConfigError`, `OSError` where they cannot be read any more.
    """
    opened = pool.opened(config.target)
    settings = opened.model_dump(include=set(OF_NUMBERS), exclude_defaults=True)
    return ServedModel(
        specrouter=__version__,
        source=opened.source,
        settings={**settings, "dtype": pool.plan(config.target).dtype},
        files={file.name: _sha256(file) for file in pool.files(config.target)},
        arithmetic=(*_arithmetic(config, pool), pool.get(config.target).computed_by),
    )


def _target(config: PoolConfig) -> ModelConfig:
    return next(model for model in config.models if model.name == config.target)


def _arithmetic(config: PoolConfig, pool: ModelPool) -> tuple[str, ...]:
    """What bits depend on beside files and settings."""
    plan = pool.plan(config.target)  # "auto" may be another on another machine, and int8 refused
    facts = [plan.dtype, plan.weights, f"noise {noise.ARITHMETIC}"]
    if plan.weights in ("int8", "int4"):
        is_w8a8 = pool.opened(config.target).weights == "auto"
        facts.append(f"quantised {ARITHMETIC} {layer_arithmetic(is_w8a8)}")
    if plan.placement.is_on_cpu:
        facts.append(f"attention {attention_arithmetic()}")
    if plan.is_recurrent and plan.placement.is_on_cpu:
        facts.append("C library" if matrix_kernels() else "torch")
    return tuple(facts)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
