"""The data plane: stateless processors that prefill, draft, verify and roll back."""

from processors.contexts import Contexts
from processors.draft import DraftProcessor
from processors.errors import NonFiniteLogits
from processors.ngram import NgramDraftProcessor
from processors.noise import gumbel
from processors.pack import FedTree
from processors.prefill import PrefillProcessor, share_chunk
from processors.proposal import Proposal
from processors.rollback import RollbackProcessor
from processors.sampler import Sampler
from processors.sampling_row import SamplingSettings
from processors.token_tree import TokenTree, join
from processors.verify import Verdict, VerifyProcessor

__all__ = [
    "Contexts",
    "DraftProcessor",
    "FedTree",
    "NgramDraftProcessor",
    "NonFiniteLogits",
    "PrefillProcessor",
    "Proposal",
    "RollbackProcessor",
    "Sampler",
    "SamplingSettings",
    "TokenTree",
    "Verdict",
    "VerifyProcessor",
    "gumbel",
    "join",
    "share_chunk",
]
