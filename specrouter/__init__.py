"""SpecRouter: text from a large language model faster, drafted by smaller ones of its family."""

from specrouter.config import RouterConfig
from specrouter.request.errors import OverloadedError, UnavailableError
from specrouter.request.handle import RequestHandle
from specrouter.request.objective import SLO
from specrouter.request.output import Delta, RequestMetrics, RequestOutput, TokenLogprobs
from specrouter.request.params import RequestError, SamplingParams, Speculation
from specrouter.request.structure import Structure
from specrouter.router import ChainRouter

__all__ = [
    "SLO",
    "ChainRouter",
    "Delta",
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
]
