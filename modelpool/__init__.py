"""Models: their declaration, loading, devices, memory, eviction, and packed attention.

Knows nothing of requests or token trees. Importing it imports neither PyTorch, which the first use
of `ModelPool` does, nor transformers' modelling code, which `ModelPool.get` does: an error of the
configuration is told without either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelpool.config import ModelConfig, PoolConfig
from modelpool.errors import ConfigError, PoolFullError, UnsupportedModelError

if TYPE_CHECKING:
    from modelpool.pool import ModelPool

__all__ = [
    "ConfigError",
    "ModelConfig",
    "ModelPool",
    "PoolConfig",
    "PoolFullError",
    "UnsupportedModelError",
]


def __getattr__(name: str) -> Any:
    if name != "ModelPool":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from modelpool.pool import ModelPool

    globals()[name] = ModelPool
    return ModelPool
