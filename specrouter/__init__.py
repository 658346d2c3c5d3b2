"""SpecRouter: faster text from a large language model, with drafts of smaller models of its family.

Names are imported lazily, when they are first used: importing PyTorch takes seconds, and
`specrouter --help` and errors of the command line should not wait for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from specrouter.version import __version__

if TYPE_CHECKING:
    from modelpool.errors import ConfigError
    from specrouter.config import RouterConfig
    from specrouter.llm import LLM
    from specrouter.request.errors import EngineDeadError, OverloadedError, UnavailableError
    from specrouter.request.handle import RequestHandle
    from specrouter.request.objective import SLO
    from specrouter.request.output import Delta, RequestMetrics, RequestOutput, TokenLogprobs
    from specrouter.request.params import RequestError, SamplingParams, Speculation
    from specrouter.request.structure import Structure
    from specrouter.router import ChainRouter

__all__ = [
    "LLM",
    "SLO",
    "ChainRouter",
    "ConfigError",
    "Delta",
    "EngineDeadError",
    "OverloadedError",
    "RequestError",
    "RequestHandle",
    "RequestMetrics",
    "RequestOutput",
    "RouterConfig",
    "SamplingParams",
    "Speculation",
    "Structure",
    "TokenLogprobs",
    "UnavailableError",
    "__version__",
]

_MODULES = {
    "LLM": "specrouter.llm",
    "SLO": "specrouter.request.objective",
    "ChainRouter": "specrouter.router",
    "ConfigError": "modelpool.errors",
    "Delta": "specrouter.request.output",
    "EngineDeadError": "specrouter.request.errors",
    "OverloadedError": "specrouter.request.errors",
    "RequestError": "specrouter.request.params",
    "RequestHandle": "specrouter.request.handle",
    "RequestMetrics": "specrouter.request.output",
    "RequestOutput": "specrouter.request.output",
    "RouterConfig": "specrouter.config",
    "SamplingParams": "specrouter.request.params",
    "Speculation": "specrouter.request.params",
    "Structure": "specrouter.request.structure",
    "TokenLogprobs": "specrouter.request.output",
    "UnavailableError": "specrouter.request.errors",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(module), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
