"""HiddenStates: the hidden states of committed tokens, for drafters that read them.

Contract: states of a pass are held until its rows are committed or rolled back, which tells which
of its tokens stay. Those are told once (`take_committed`), by position, so that moving slots
changes nothing. Tokens that a row takes over with keys and values have none.
"""

import numpy as np
import torch
from torch import Tensor

from statemgr.arrays import Bools, Ints

_Pass = tuple[Ints, Ints, Tensor]  # numbers of slots, where their states stand, states


class HiddenStates:
    def __init__(self, width: int) -> None:
        """`width`: a slot's number is `row * width + slot`."""
        self._width = width
        self._passes: list[_Pass] = []
        self._committed: list[_Pass] = []  # rows, positions, states of tokens

    def add(self, slots: Ints, states: Tensor) -> None:
        """Of a pass over T tokens. `slots`: [T] their numbers; `states`: [T, layers, hidden_size],
        of the same layers in all passes."""
        self._passes.append((slots, np.arange(len(slots)), states))

    def take_committed(self) -> list[_Pass]:
        """Rows [n], positions [n] and states [n, layers, hidden_size] of tokens that were committed
        since the last call, of rows that are still there; of a row in rising order."""
        taken, self._committed = self._committed, []
        return taken

    def commit(self, rows: Ints, is_valid: Bools, positions: Ints) -> None:
        """Of these rows what is valid was committed.

        Args: `is_valid`, `positions`: of all slots, by their numbers.
        """
        for slots, index, states in self._passes:
            row = slots // self._width
            held = is_valid[slots] & np.isin(row, rows)
            if held.any():
                own = states.index_select(0, torch.from_numpy(index[held]).to(states.device))
                self._committed.append((row[held], positions[slots[held]], own))
        self.forget(rows)

    def forget(self, rows: Ints) -> None:
        """What passes have of rows that were not committed since."""
        left = [(one, ~np.isin(one[0] // self._width, rows)) for one in self._passes]
        self._passes = [
            (slots[own], index[own], states) for (slots, index, states), own in left if own.any()
        ]

    def drop(self, row: int) -> None:
        """All of a row."""
        self.forget(np.array([row]))
        told = [(one, one[0] != row) for one in self._committed]
        self._committed = [
            (rows[own], positions[own], states[torch.from_numpy(own).to(states.device)])
            for (rows, positions, states), own in told
            if own.any()
        ]
