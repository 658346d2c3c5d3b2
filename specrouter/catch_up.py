"""Catching up: how much drafters read in one cycle of texts that they lack.

A drafter lags behind a row whose prompt it never saw, or whose text others decoded. In one cycle
each model reads at most a chunk of what it lacks, of all rows together, so that no row's long text
holds up the others; a row that still lags by more than `CATCH_UP_TOKENS` decodes without a draft.
The shortest texts come first: those rows draft soonest, and since the target reads no more of new
prompts in a cycle, they cannot keep a long text waiting for longer than it is busy.

Pure: no clock, no tensors. Not here: the reading (`specrouter.drafter_prefill`).
"""

import numpy as np
from numpy.typing import NDArray

from processors import share_chunk

Ints = NDArray[np.int64]

CATCH_UP_TOKENS = 8  # of a row, that a model reads in passing, in the forward that it drafts with


def share_shortest_first(wanted: Ints, chunk: int) -> Ints:
    """[R] of `chunk` tokens, what each row gets that wants so many."""
    order = np.argsort(wanted, kind="stable")
    shares = np.zeros_like(wanted)
    shares[order] = share_chunk(wanted[order], chunk)
    return shares
