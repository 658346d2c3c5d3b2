"""RollbackProcessor: after a commit, every model forgets what was not committed. Stateless.

It compares what a state holds with the committed tokens, so it needs no account of who drafted or
verified what: the longest common prefix stays, without the last committed token, whose key and
value the next forward will write.
"""

import numpy as np
from numpy.typing import NDArray

from statemgr import ModelState, StateManager

Ints = NDArray[np.int64]


class RollbackProcessor:
    def rollback(self, state: ModelState, manager: StateManager, rows: Ints) -> None:
        end = int(state.ends[rows].max(initial=0))
        mask = state.cache_mask[rows, :end]
        positions = state.positions[rows, :end]
        committed = manager.tokens[rows[:, None], positions]
        wrong = mask & (state.cache_tokens[rows, :end] != committed)
        limit = manager.counts[rows] - 1
        first_wrong = np.where(wrong, positions, np.iinfo(np.int64).max).min(
            axis=1, initial=np.iinfo(np.int64).max
        )
        state.rollback(rows, np.minimum(first_wrong, limit))
