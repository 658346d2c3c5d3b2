"""The data plane: stateless processors that prefill, draft, verify and roll back."""

from processors.contexts import Contexts
from processors.draft import DraftProcessor
from processors.drafts import DraftRequest, DraftResult
from processors.errors import NonFiniteLogits
from processors.ngram import NgramDraftProcessor
from processors.pack import ActiveModel, FedTree
from processors.prefill import PrefillProcessor, share_chunk
from processors.rollback import RollbackProcessor
from processors.sampler import Sampler
from processors.sampling_row import SamplingSettings
from processors.token_tree import TokenTree, join
from processors.verify import PrefillChunks, VerifyProcessor, VerifyRequest
from processors.verify_result import VerifyResult

__all__ = [
    "ActiveModel",
    "Contexts",
    "DraftProcessor",
    "DraftRequest",
    "DraftResult",
    "FedTree",
    "NgramDraftProcessor",
    "NonFiniteLogits",
    "PrefillChunks",
    "PrefillProcessor",
    "RollbackProcessor",
    "Sampler",
    "SamplingSettings",
    "TokenTree",
    "VerifyProcessor",
    "VerifyRequest",
    "VerifyResult",
    "join",
    "share_chunk",
]
