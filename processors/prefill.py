"""PrefillProcessor: brings a model's state up to the committed tokens, in chunks.

The target's chunks are packed with the decoding requests by the VerifyProcessor; this one serves
every other model. Stateless. Not here: how much is read in which cycle.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from processors.active_model import ActiveModel
from processors.pack import PackPlan, run_pack
from processors.token_tree import TokenTree

Ints = NDArray[np.int64]


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
        wanted = np.ones(len(rows), dtype=np.bool_)
        plan = PackPlan(rows, tails, wanted, tails - 1)
        result = run_pack(active, plan, TokenTree.empty(rows[:0]))
        order = np.argsort(np.concatenate((np.cumsum(tails) - 1, _all_but_last(tails))))
        index = torch.from_numpy(order).to(result.logits.device)
        return torch.cat((result.logits, result.earlier)).index_select(0, index)


def _all_but_last(sizes: Ints) -> Ints:
    """Of blocks of such sizes, the places that are not the last of their block."""
    place = np.arange(int(sizes.sum()))
    others: Ints = np.setdiff1d(place, np.cumsum(sizes) - 1)
    return others


def share_chunk(wanted: Ints, chunk: int) -> Ints:
    """Gives `chunk` tokens to rows in their order, first come first served."""
    before = np.cumsum(wanted) - wanted
    shared: Ints = np.clip(chunk - before, 0, wanted)
    return shared
