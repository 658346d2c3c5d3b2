"""PrefillProcessor: brings a model's state up to the committed tokens, in chunks.

Drafters prefill lazily, when a chain first needs them. The target's chunks are packed beside the
decoding requests by the VerifyProcessor; this one serves every other model. Stateless.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelpool.packed_model import PackedModel
from processors.pack import PackPlan, lag, run_pack
from processors.token_tree import TokenTree
from statemgr import ModelState, StateManager

Ints = NDArray[np.int64]


class PrefillProcessor:
    """Args: `chunk`: the most tokens of one forward."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk

    def catch_up(
        self, model: PackedModel, state: ModelState, manager: StateManager, rows: Ints, leave: int
    ) -> None:
        """Forwards until every row lags by at most `leave` tokens."""
        behind = lag(state, manager, rows)
        while self._feed(model, state, manager, rows, np.where(behind > leave, behind, 0)):
            behind = lag(state, manager, rows)

    def read(
        self,
        model: PackedModel,
        state: ModelState,
        manager: StateManager,
        rows: Ints,
        lengths: Ints,
        tails: Ints,
    ) -> Tensor:
        """Forwards until row i has read its first `lengths[i]` tokens.

        Args:
            tails: [R] how many of the last of these tokens' logits are wanted, at least one.

        Returns:
            [sum(tails), V] row after row.
        """
        missing = lengths - tails - state.lengths(rows)
        while self._feed(model, state, manager, rows, np.maximum(missing, 0)):
            missing = lengths - tails - state.lengths(rows)
        wanted = np.ones(len(rows), dtype=np.bool_)
        plan = PackPlan(rows, tails, wanted, tails - 1)
        result = run_pack(model, state, manager, plan, TokenTree.empty(rows[:0]))
        order = np.argsort(np.concatenate((np.cumsum(tails) - 1, _all_but_last(tails))))
        index = torch.from_numpy(order).to(result.logits.device)
        return torch.cat((result.logits, result.earlier)).index_select(0, index)

    def _feed(
        self,
        model: PackedModel,
        state: ModelState,
        manager: StateManager,
        rows: Ints,
        missing: Ints,
    ) -> bool:
        """One forward over a chunk of what rows miss; False where nothing is missing."""
        feed = share_chunk(missing, self.chunk)
        active = feed > 0
        if not active.any():
            return False
        nothing = np.zeros(int(active.sum()), dtype=np.bool_)
        plan = PackPlan(rows[active], feed[active], nothing)
        run_pack(model, state, manager, plan, TokenTree.empty(rows[:0]))
        return True


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
