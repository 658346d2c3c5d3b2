"""Models: their declaration, loading, devices, memory, eviction, and packed attention.

Knows nothing of requests or token trees. Importing it does not import transformers' modelling
code; `ModelPool.get` does.
"""

from modelpool.config import ModelConfig, PoolConfig
from modelpool.errors import ConfigError, PoolFullError, UnsupportedModelError
from modelpool.pool import ModelPool

__all__ = [
    "ConfigError",
    "ModelConfig",
    "ModelPool",
    "PoolConfig",
    "PoolFullError",
    "UnsupportedModelError",
]
