"""SpecRouter: text from a large language model faster, drafted by smaller ones of its family."""

from specrouter.config import RouterConfig
from specrouter.errors import OverloadedError, UnavailableError
from specrouter.output import Delta, RequestMetrics, RequestOutput, TokenLogprobs
from specrouter.params import RequestError, SamplingParams, Speculation
from specrouter.request import RequestHandle
from specrouter.router import ChainRouter
from specrouter.slo import SLO
from specrouter.structure import Structure

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
