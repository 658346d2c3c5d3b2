"""Models: declaration, loading, devices, memory, eviction and packed attention.

This package depends on neither requests nor token trees. Importing it imports neither PyTorch,
which the first use of `ModelPool` imports, nor the modelling code of transformers, which
`ModelPool.get` imports: an error in the configuration is reported without either.
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
