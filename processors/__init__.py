"""The data plane: stateless processors that prefill, draft, verify and roll back."""

from processors.draft import DraftProcessor, DraftResult
from processors.noise import gumbel
from processors.prefill import PrefillProcessor, share_chunk
from processors.rollback import RollbackProcessor
from processors.sampler import Sampler, SamplingSettings
from processors.token_tree import TokenTree, join
from processors.verify import VerifyProcessor, VerifyResult

__all__ = [
    "DraftProcessor",
    "DraftResult",
    "PrefillProcessor",
    "RollbackProcessor",
    "Sampler",
    "SamplingSettings",
    "TokenTree",
    "VerifyProcessor",
    "VerifyResult",
    "gumbel",
    "join",
    "share_chunk",
]
