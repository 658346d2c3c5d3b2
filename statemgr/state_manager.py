"""Rows, reservations and the committed tokens that every model's state is a prefix of.

Contract: a row belongs to one running request, in all models. What a request may need is reserved
when it is admitted, so a running request never fails for KV memory; it takes blocks as its text
grows. Model states come into being on first use and may be dropped at any time: a dropped or
lagging state catches up by re-reading committed tokens. What a row that ends has read is kept, as
far as there is memory, for rows that begin with the same tokens under the same salt
(`PrefixSharing`).

Not here: which models there are, what they are for, and when a token is accepted.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from statemgr.arrays import Bools, Ints
from statemgr.blocks import BLOCK_SLOTS, BlockTables, whole_blocks
from statemgr.kv_store import LayerShape
from statemgr.layer_state import RecurrentShape, StateKey
from statemgr.model_state import ModelState
from statemgr.prefix_cache import CacheCounts, CacheUse, TokenChain
from statemgr.prefix_sharing import PrefixSharing


def row_slots(max_tokens: int, tree_tokens: int = 0) -> int:
    """Slots of a row for so many tokens and the nodes of a tree beside them: whole blocks."""
    return whole_blocks(max_tokens + tree_tokens)


def row_tokens(slots: int, tree_tokens: int = 0) -> int:
    """The most tokens that a row may have for `row_slots` to be at most `slots`; 0: none."""
    return max(0, slots // BLOCK_SLOTS * BLOCK_SLOTS - tree_tokens)


class StateManager:
    """Args:
    max_tokens: of a row, committed and drafted ones up to the request's length.
    budget_tokens: that all rows may reserve together; None: no bound. It saves no memory.
    tree_tokens: slots of each row beyond its tokens, for the nodes of a token tree.
    kv_slots: of every model's store; None: all rows may be as long as a row can be.
    """

    def __init__(
        self,
        rows: int,
        max_tokens: int,
        budget_tokens: int | None = None,
        tree_tokens: int = 0,
        kv_slots: int | None = None,
    ) -> None:
        self.rows = rows
        self.max_tokens = max_tokens
        self.tree_tokens = tree_tokens
        self.slots = row_slots(max_tokens, tree_tokens)
        self.kv_slots = (kv_slots or rows * self.slots) // BLOCK_SLOTS * BLOCK_SLOTS
        self.budget_tokens = budget_tokens
        self.tokens: Ints = np.zeros((rows, self.slots), dtype=np.int64)  # committed
        self.counts: Ints = np.zeros(rows, dtype=np.int64)  # n, committed tokens of each row
        self._reserved: Ints = np.zeros(rows, dtype=np.int64)  # 0: the row is free
        self._states: dict[str, ModelState] = {}
        width, blocks = self.slots // BLOCK_SLOTS, self.kv_slots // BLOCK_SLOTS
        self._tables = BlockTables(rows, width, blocks, self._states)
        self._sharing = PrefixSharing(self._tables, self._states, self.committed)

    @property
    def free_rows(self) -> int:
        return int((self._reserved == 0).sum())

    @property
    def reserved_tokens(self) -> int:
        return int(self._reserved.sum())

    @property
    def is_bounded(self) -> bool:
        """Whether there is less than for as many of the longest requests as there are rows."""
        return self.kv_slots < self.rows * self.slots

    @property
    def free_slots(self) -> int:
        """That requests could reserve; what is cached goes where they want it."""
        return self._tables.unreserved * BLOCK_SLOTS

    @property
    def cached_slots(self) -> int:
        """Of prefixes that nobody runs with."""
        return self._sharing.cache.blocks * BLOCK_SLOTS

    @property
    def cache_counts(self) -> CacheCounts:
        return self._sharing.cache.counts

    def slots_for(self, tokens: int) -> int:
        """That a request for so many tokens reserves."""
        return row_slots(tokens, self.tree_tokens)

    def can_ever_fit(self, tokens: int) -> bool:
        budget = self.budget_tokens
        fits = tokens <= self.max_tokens and self.slots_for(tokens) <= self.kv_slots
        return fits and (budget is None or tokens <= budget)

    def allocate(
        self, prompt: Sequence[int], reserve: int, use: CacheUse | None = None
    ) -> int | None:
        """A free row, holding `prompt`; None where there is no row or memory now.

        Every model has read what is cached of the prompt, but for its last token.
        """
        assert 0 < len(prompt) <= reserve <= self.slots
        free = np.flatnonzero(self._reserved == 0)
        blocks = min(self.slots_for(reserve), self.slots) // BLOCK_SLOTS
        budget = self.budget_tokens
        if not len(free) or (budget is not None and self.reserved_tokens + reserve > budget):
            return None
        if blocks > self._tables.unreserved:
            return None
        row, found = int(free[0]), self._sharing.find(TokenChain(prompt), use or CacheUse())
        self._tables.limits[row] = blocks
        self._reserved[row] = reserve
        self.counts[row] = len(prompt)
        self.tokens[row, : len(prompt)] = prompt
        try:
            self._sharing.begin(row, found)
        except BaseException:
            self.free(row)
            raise
        return row

    def grow(self, rows: Ints, slots: Ints) -> Ints:
        """Takes what rows lack of so many slots. Returns the rows that lack some still: none within
        what they reserved."""
        return self._tables.grow(rows, slots)

    def extend(self, row: int, tokens: Ints) -> None:
        """Commits tokens of a row."""
        count = int(self.counts[row])
        assert count + len(tokens) <= self._reserved[row], "more tokens than were reserved"
        self.tokens[row, count : count + len(tokens)] = tokens
        self.counts[row] = count + len(tokens)

    def free(self, row: int, keep: bool = False) -> None:
        """Gives a row back, in every model. `keep`: what it has read is good for others."""
        self._sharing.end(row, keep)
        for state in self._states.values():
            state.free(row)
        self._tables.end(row)
        self._reserved[row] = 0
        self.counts[row] = 0

    def committed(self, row: int) -> Ints:
        """[n], not copied."""
        return self.tokens[row, : self.counts[row]]

    # Prefixes

    def follow(self) -> list[int]:
        """Rows take over what others have read meanwhile of the prompt that they share. Returns
        those that did, in any model. For the time between cycles."""
        return self._sharing.follow()

    def leaders(self) -> dict[int, tuple[int, int]]:
        """By row: the one that reads what both begin with, whom it may wait for, and how many
        tokens that will be."""
        return self._sharing.leaders()

    def waits(self, name: str, rows: Ints) -> Bools:
        """[R] rows that should not read with a model now: one before them reads the same tokens for
        them, in a block that they share."""
        return self._sharing.waits(name, rows)

    def inherited(self, row: int, model: str | None = None) -> int:
        """Tokens of a row that a model did not read for it; None: the one with the most."""
        return self._sharing.inherited(row, model)

    def cached(self, chain: TokenChain, use: CacheUse) -> dict[str, int]:
        """By model: tokens that it would not have to read again, of what no row runs with."""
        return self._sharing.cached(chain, use).lengths

    # States

    def state(self, name: str) -> ModelState | None:
        return self._states.get(name)

    def open_state(
        self,
        name: str,
        layers: Mapping[int, LayerShape],
        recurrent: Mapping[StateKey, RecurrentShape] | None = None,
        is_target: bool = False,
    ) -> ModelState:
        """A model's state, created on first use. `is_target`: what it need not read decides what
        rows take over, and how long they follow others."""
        if name not in self._states:
            tables, wanted = self._tables, self._sharing.wanted
            self._states[name] = ModelState(
                layers, self.rows, self.slots, tables, recurrent, wanted
            )
            if is_target:
                self._sharing.target = name
        return self._states[name]

    def drop_state(self, name: str) -> None:
        """Forgets a model's cache, as when the model is evicted."""
        if self._states.pop(name, None) is not None:
            self._sharing.forget_model(name)

    def check_integrity(self) -> None:
        """Asserts every invariant; for the time between cycles."""
        self._sharing.check_integrity()
        for row in range(self.rows):
            for state in self._states.values():
                if self._reserved[row]:
                    state.check_integrity(row, self.committed(row))
                else:
                    assert self.counts[row] == 0, f"free row {row} has tokens"
                    state.check_free(row)
            assert self.counts[row] <= max(self._reserved[row], 0), f"row {row} overran"
        assert self.budget_tokens is None or self.reserved_tokens <= self.budget_tokens
