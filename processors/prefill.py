"""PrefillProcessor: brings a model's state up to the committed tokens, in chunks.

The target's chunks are packed with the decoding requests by the VerifyProcessor; this one serves
every other model. It has no state, and does not decide how much is read in which cycle.
"""

import numpy as np
from torch import Tensor

from processors.pack import ActiveModel, PackPlan, run_pack
from processors.token_tree import Ints, TokenTree


class PrefillProcessor:
    """Reader of committed tokens, at most `chunk` in one forward of `read`."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk

    def feed(
        self, active: ActiveModel, rows: Ints, counts: Ints, tails: Ints | None = None
    ) -> Tensor:
        """Run one forward over the next `counts[i]` committed tokens of row i, none for 0.

        `tails`, [R], are the numbers of last tokens whose logits are wanted. Returns these logits,
        [sum(tails), V], row after row.
        """
        fed = counts > 0
        nothing = np.zeros(int(fed.sum()), dtype=np.bool_)
        earlier = None if tails is None else tails[fed]
        plan = PackPlan(rows[fed], counts[fed], nothing, earlier)
        return run_pack(active, plan, TokenTree.empty(rows[:0])).earlier

    def read(self, active: ActiveModel, rows: Ints, lengths: Ints, tails: Ints) -> Tensor:
        """Run forwards until row i has read its first `lengths[i]` tokens.

        `tails`, [R], are the numbers of last tokens whose logits are wanted, at least one. Returns
        these logits, [sum(tails), V], row after row.
        """
        while (missing := np.maximum(lengths - tails - active.state.lengths(rows), 0)).any():
            self.feed(active, rows, share_chunk(missing, self.chunk))
        return self.feed(active, rows, tails, tails)


def share_chunk(wanted: Ints, chunk: int) -> Ints:
    """Share `chunk` tokens among rows in their order, first come, first served."""
    before = np.cumsum(wanted) - wanted
    shared: Ints = np.clip(chunk - before, 0, wanted)
    return shared
