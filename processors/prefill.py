"""PrefillProcessor: brings a model's state up to the committed tokens, in chunks.

The target's chunks are packed with the decoding requests by the VerifyProcessor; this one serves
every other model. Stateless. Not here: how much is read in which cycle.
"""

import numpy as np
from torch import Tensor

from processors.pack import ActiveModel, PackPlan, run_pack
from processors.token_tree import Ints, TokenTree


class PrefillProcessor:
    """Args: `chunk`: the most tokens of one forward of `read`."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk

    def feed(
        self, active: ActiveModel, rows: Ints, counts: Ints, tails: Ints | None = None
    ) -> Tensor:
        """One forward over the next `counts[i]` committed tokens of row i, none for 0.

        Args:
            tails: [R] how many of the last of these tokens' logits are wanted.

        Returns:
            [sum(tails), V] row after row.
        """
        fed = counts > 0
        nothing = np.zeros(int(fed.sum()), dtype=np.bool_)
        earlier = None if tails is None else tails[fed]
        plan = PackPlan(rows[fed], counts[fed], nothing, earlier)
        return run_pack(active, plan, TokenTree.empty(rows[:0])).earlier

    def read(self, active: ActiveModel, rows: Ints, lengths: Ints, tails: Ints) -> Tensor:
        """Forwards until row i has read its first `lengths[i]` tokens.

        Args:
            tails: [R] how many of the last of these tokens' logits are wanted, at least one.

        Returns:
            [sum(tails), V] row after row.
        """
        while (missing := np.maximum(lengths - tails - active.state.lengths(rows), 0)).any():
            self.feed(active, rows, share_chunk(missing, self.chunk))
        return self.feed(active, rows, tails, tails)


def share_chunk(wanted: Ints, chunk: int) -> Ints:
    """Gives `chunk` tokens to rows in their order, first come first served."""
    before = np.cumsum(wanted) - wanted
    shared: Ints = np.clip(chunk - before, 0, wanted)
    return shared
