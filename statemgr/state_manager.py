"""Rows, reservations and the committed tokens that every model's state is a prefix of.

Contract: a row belongs to one running request, in all models. What a request may need is reserved
when it is admitted, so a running request never fails for KV memory. Model states come into being
on first use and may be dropped at any time: a dropped or lagging state catches up by
re-reading committed tokens.

Not here: which models there are, what they are for, and when a token is accepted.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from statemgr.kv_store import LayerShape
from statemgr.model_state import ModelState
from statemgr.row_groups import KV_QUANTUM

Ints = NDArray[np.int64]


def row_slots(max_tokens: int, tree_tokens: int = 0) -> int:
    """Slots of a row for so many tokens and the nodes of a tree beside them: whole quanta.

    A store takes the memory of all slots of all rows when it is made, on any device.
    """
    return -(-(max_tokens + tree_tokens) // KV_QUANTUM) * KV_QUANTUM


def row_tokens(slots: int, tree_tokens: int = 0) -> int:
    """The most tokens that a row may have for `row_slots` to be at most `slots`; 0: none."""
    return max(0, slots // KV_QUANTUM * KV_QUANTUM - tree_tokens)


class StateManager:
    """Args:
    max_tokens: of a row, committed and drafted ones up to the request's length.
    budget_tokens: that all rows may reserve together; None: no bound. It saves no memory.
    tree_tokens: slots of each row beyond `max_tokens`, for the nodes of a token tree.
    """

    def __init__(
        self, rows: int, max_tokens: int, budget_tokens: int | None = None, tree_tokens: int = 0
    ) -> None:
        self.rows = rows
        self.max_tokens = max_tokens
        self.slots = row_slots(max_tokens, tree_tokens)
        self.budget_tokens = budget_tokens
        self.tokens: Ints = np.zeros((rows, self.slots), dtype=np.int64)  # committed
        self.counts: Ints = np.zeros(rows, dtype=np.int64)  # n, committed tokens of each row
        self._reserved: Ints = np.zeros(rows, dtype=np.int64)  # 0: the row is free
        self._states: dict[str, ModelState] = {}

    @property
    def free_rows(self) -> int:
        return int((self._reserved == 0).sum())

    @property
    def reserved_tokens(self) -> int:
        return int(self._reserved.sum())

    def can_ever_fit(self, tokens: int) -> bool:
        budget = self.budget_tokens
        return tokens <= self.max_tokens and (budget is None or tokens <= budget)

    def allocate(self, prompt: Sequence[int], reserve: int) -> int | None:
        """The lowest free row, holding `prompt`; None where there is no row or memory now."""
        assert 0 < len(prompt) <= reserve <= self.slots
        free = np.flatnonzero(self._reserved == 0)
        budget = self.budget_tokens
        if not len(free) or (budget is not None and self.reserved_tokens + reserve > budget):
            return None
        row = int(free[0])
        self._reserved[row] = reserve
        self.counts[row] = len(prompt)
        self.tokens[row, : len(prompt)] = prompt
        return row

    def extend(self, row: int, tokens: Ints) -> None:
        """Commits tokens of a row."""
        count = int(self.counts[row])
        assert count + len(tokens) <= self._reserved[row], "more tokens than were reserved"
        self.tokens[row, count : count + len(tokens)] = tokens
        self.counts[row] = count + len(tokens)

    def free(self, row: int) -> None:
        """Gives a row back, in every model."""
        self._reserved[row] = 0
        self.counts[row] = 0
        for state in self._states.values():
            state.free(row)

    def committed(self, row: int) -> Ints:
        """[n], not copied."""
        return self.tokens[row, : self.counts[row]]

    def state(self, name: str) -> ModelState | None:
        return self._states.get(name)

    def open_state(
        self, name: str, layers: Sequence[LayerShape], canonical: bool = False
    ) -> ModelState:
        """A model's state, created on first use."""
        if name not in self._states:
            self._states[name] = ModelState(layers, self.rows, self.slots, canonical)
        return self._states[name]

    def drop_state(self, name: str) -> None:
        """Forgets a model's cache, as when the model is evicted."""
        self._states.pop(name, None)

    def check_integrity(self) -> None:
        """Asserts every invariant; for the time between cycles."""
        for row in range(self.rows):
            for state in self._states.values():
                if self._reserved[row]:
                    state.check_integrity(row, self.committed(row))
                else:
                    assert self.counts[row] == 0, f"free row {row} has tokens"
                    state.check_free(row)
            assert self.counts[row] <= max(self._reserved[row], 0), f"row {row} overran"
        assert self.budget_tokens is None or self.reserved_tokens <= self.budget_tokens
