"""PrefillProcessor: brings a model's state up to the committed tokens, in chunks.

Drafters prefill lazily, when a chain first needs them. The target's chunks are packed beside the
decoding requests by the VerifyProcessor; this one serves every other model. Stateless.
"""

import numpy as np
from numpy.typing import NDArray

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
        while True:
            behind = lag(state, manager, rows)
            feed = share_chunk(np.where(behind > leave, behind, 0), self.chunk)
            active = feed > 0
            if not active.any():
                return
            nothing = np.zeros(int(active.sum()), dtype=np.bool_)
            plan = PackPlan(rows[active], feed[active], nothing)
            run_pack(model, state, manager, plan, TokenTree.empty(rows[:0]))


def share_chunk(wanted: Ints, chunk: int) -> Ints:
    """Gives `chunk` tokens to rows in their order, first come first served."""
    before = np.cumsum(wanted) - wanted
    shared: Ints = np.clip(chunk - before, 0, wanted)
    return shared
