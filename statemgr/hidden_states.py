"""HiddenStates: the hidden states of committed tokens, for drafters that read them.

Contract: the states of a pass are held until its rows are committed or rolled back, which decides
which of its tokens stay. `take_committed` returns the states of these tokens once, with their
positions, so that moving slots changes nothing. Tokens whose keys and values a row takes over from
elsewhere have no hidden states.
"""

import numpy as np
import torch
from torch import Tensor

from statemgr.arrays import Bools, Ints

_Pass = tuple[Ints, Ints, Tensor]  # slot numbers, their indices in the states, states


class HiddenStates:
    def __init__(self, width: int) -> None:
        """Set the slots per row, `width`: a slot's number is `row * width + slot`."""
        self._width = width
        self._passes: list[_Pass] = []
        self._committed: list[_Pass] = []  # rows, positions, states of tokens

    def add(self, slots: Ints, states: Tensor) -> None:
        """Add the states of a pass over T tokens.

        `slots` are their numbers, [T]; `states` is [T, layers, hidden_size], with the same layers
        in all passes.
        """
        self._passes.append((slots, np.arange(len(slots)), states))

    def take_committed(self) -> list[_Pass]:
        """Return the states of tokens committed since the last call, for rows that still exist.

        Each entry has rows [n], positions [n] and states [n, layers, hidden_size]. The positions of
        a row are in rising order.
        """
        taken, self._committed = self._committed, []
        return taken

    def commit(self, rows: Ints, is_valid: Bools, positions: Ints) -> None:
        """Keep the states of the valid slots of rows that were committed, and forget the others.

        `is_valid` and `positions` cover all slots, by their numbers.
        """
        for slots, index, states in self._passes:
            row = slots // self._width
            held = is_valid[slots] & np.isin(row, rows)
            if held.any():
                own = states.index_select(0, torch.from_numpy(index[held]).to(states.device))
                self._committed.append((row[held], positions[slots[held]], own))
        self.forget(rows)

    def forget(self, rows: Ints) -> None:
        """Forget the states of these rows that are not committed."""
        left = [(one, ~np.isin(one[0] // self._width, rows)) for one in self._passes]
        self._passes = [
            (slots[own], index[own], states) for (slots, index, states), own in left if own.any()
        ]

    def drop(self, row: int) -> None:
        """Forget all states of a row, committed ones included."""
        self.forget(np.array([row]))
        committed = [(one, one[0] != row) for one in self._committed]
        self._committed = [
            (rows[own], positions[own], states[torch.from_numpy(own).to(states.device)])
            for (rows, positions, states), own in committed
            if own.any()
        ]
