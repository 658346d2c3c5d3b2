"""HiddenStates: of each row the hidden states of its last committed token, for drafters.

Contract: states of a pass are held until its rows are committed or rolled back, which tells what
token of a row is the last one. What a row keeps belongs to a position: moving slots does not change
it. It goes when the row reads on without hidden states, when the token is rolled back, and with the
row, preempted or ended; a row that takes over keys and values has none until its next pass. States
of all committed tokens are told once (`take_committed`).
"""

import numpy as np
import torch
from torch import Tensor

from statemgr.arrays import Bools, Ints

_Pass = tuple[Ints, Ints, Tensor]  # numbers of slots, where their states stand, states


class HiddenStates:
    def __init__(self, rows: int, width: int) -> None:
        """`width`: a slot's number is `row * width + slot`."""
        self._width = width
        self._counts: Ints = np.zeros(rows, dtype=np.int64)  # tokens up to the one they are of
        self._kept: Tensor | None = None  # [rows, layers, hidden_size]
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

    def commit(
        self, rows: Ints, lengths: Ints, is_valid: Bools, positions: Ints, tells: bool = True
    ) -> None:
        """These rows were committed, or rolled back.

        Args:
            lengths: tokens of all rows, by row.
            is_valid, positions: of all slots, by their numbers.
            tells: what is valid is committed.
        """
        if self._kept is None and not self._passes:
            return
        for slots, index, states in self._passes:
            row = slots // self._width
            held = is_valid[slots] & np.isin(row, rows)
            if tells and held.any():
                own = states.index_select(0, torch.from_numpy(index[held]).to(states.device))
                self._committed.append((row[held], positions[slots[held]], own))
            found = held & (positions[slots] == lengths[row] - 1)
            self._keep(row[found], states, index[found])
            self._counts[row[found]] = lengths[row[found]]
        self.forget(rows)
        self._counts[rows] *= self._counts[rows] == lengths[rows]

    def forget(self, rows: Ints) -> None:
        """What passes have of rows that were not committed since."""
        left = [(one, ~np.isin(one[0] // self._width, rows)) for one in self._passes]
        self._passes = [
            (slots[own], index[own], states) for (slots, index, states), own in left if own.any()
        ]

    def drop(self, row: int) -> None:
        """All of a row."""
        self.forget(np.array([row]))
        self._counts[row] = 0
        told = [(one, one[0] != row) for one in self._committed]
        self._committed = [
            (rows[own], positions[own], states[torch.from_numpy(own).to(states.device)])
            for (rows, positions, states), own in told
            if own.any()
        ]

    def has(self, rows: Ints) -> Bools:
        """[R] whether a row keeps any."""
        return self._counts[rows] > 0

    def of(self, rows: Ints) -> Tensor:
        """[R, layers, hidden_size] of rows that keep some."""
        assert self._kept is not None
        return self._kept.index_select(0, self._index(rows))

    def _keep(self, rows: Ints, states: Tensor, index: Ints) -> None:
        if self._kept is None:
            self._kept = states.new_empty((len(self._counts), *states.shape[1:]))
        self._kept.index_copy_(0, self._index(rows), states.index_select(0, self._index(index)))

    def _index(self, values: Ints) -> Tensor:
        assert self._kept is not None
        return torch.from_numpy(values).to(self._kept.device, non_blocking=True)
