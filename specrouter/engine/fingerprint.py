"""A fingerprint of all that texts depend on: the target, its dtype and weights, and the version."""

import hashlib
from pathlib import Path

from modelpool import ModelPool
from modelpool.attention.path_cpu import attention_arithmetic
from modelpool.config import ModelConfig, PoolConfig
from modelpool.fast.compiled_layers import layer_arithmetic
from modelpool.fast.quantised import ARITHMETIC
from modelpool.kernels.recurrence import matrix_kernels
from processors import noise
from specrouter.request.receipt import OF_NUMBERS, OF_THE_POOL, ServedModel
from specrouter.version import __version__

_VARIES = "_varies"


def with_bits(fingerprint: str, pool: ModelPool) -> str:
    """Return the fingerprint with a suffix if texts may depend on other tokens of a pack.

    A trial of the loaded target determines that.
    """
    return fingerprint + _VARIES if pool.bits_depend_on is not None else fingerprint


def fingerprint_of(config: PoolConfig, pool: ModelPool) -> str:
    """Return the fingerprint of the target; texts do not depend on drafters or their use."""
    placeless = _target(config).model_dump_json(exclude={"device"})
    facts = (__version__, placeless, *_arithmetic(config, pool))
    digest = hashlib.sha256(" ".join(facts).encode())
    return f"fp_{digest.hexdigest()[:12]}"


def served_model(config: PoolConfig, pool: ModelPool) -> ServedModel:
    """Return a receipt's data about the target; hashing its files takes 1 to 2 s per gigabyte.

    Raises `ConfigError` or `OSError` if the files can no longer be read.
    """
    opened = pool.opened(config.target)
    settings = {
        **config.model_dump(include=set(OF_THE_POOL), exclude_defaults=True),
        **opened.model_dump(include=set(OF_NUMBERS), exclude_defaults=True),
        "dtype": pool.plan(config.target).dtype,
    }
    return ServedModel(
        specrouter=__version__,
        source=opened.source,
        settings=settings,
        files={file.name: _sha256(file) for file in pool.files(config.target)},
        arithmetic=(*_arithmetic(config, pool), pool.get(config.target).computed_by),
    )


def _target(config: PoolConfig) -> ModelConfig:
    return next(model for model in config.models if model.name == config.target)


def _arithmetic(config: PoolConfig, pool: ModelPool) -> tuple[str, ...]:
    """Return the kinds of arithmetic that bits depend on, beside files and settings."""
    plan = pool.plan(config.target)  # depends on the machine: "auto" is resolved, int8 may be off
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
