"""Rows, their memory and the committed tokens that every model's state is a prefix of.

Contract: a row belongs to one running request, in all models. It begins where there are blocks for
its prompt and a margin, and takes more as its text grows; where there are none left, somebody has
to end. Model states come into being on first use and may be dropped at any time: a dropped or
lagging state catches up by re-reading committed tokens. What a row that ends has read is kept, as
far as there is memory, for rows that begin with the same tokens under the same salt
(`PrefixSharing`).

Not here: which models there are, what they are for, and when a token is accepted.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from modelpool.attention.kv_view import KVLayer
from modelpool.recurrent import RecurrentLayer, StateKey
from statemgr.arrays import Bools, Ints
from statemgr.blocks import BLOCK_SLOTS, BlockTables, whole_blocks
from statemgr.model_state import ModelState
from statemgr.prefix_cache import CacheCounts, CacheUse, TokenChain
from statemgr.prefix_sharing import PrefixSharing

GROWTH_TOKENS = 64  # of its text, that a row is expected to need blocks for when it begins


def row_slots(max_tokens: int, tree_tokens: int = 0) -> int:
    """Slots of a row for so many tokens and the nodes of a tree beside them: whole blocks."""
    return whole_blocks(max_tokens + tree_tokens)


def row_tokens(slots: int, tree_tokens: int = 0) -> int:
    """The most tokens that a row may have for `row_slots` to be at most `slots`; 0: none."""
    return max(0, slots // BLOCK_SLOTS * BLOCK_SLOTS - tree_tokens)


class StateManager:
    """Args:
    max_tokens: of a row, committed and drafted ones up to the request's length.
    tree_tokens: slots of each row beyond its tokens, for the nodes of a token tree.
    kv_slots: of every model's store; None: all rows may be as long as a row can be.
    """

    def __init__(
        self,
        rows: int,
        max_tokens: int,
        tree_tokens: int = 0,
        kv_slots: int | None = None,
    ) -> None:
        self.rows = rows
        self.max_tokens = max_tokens
        self.tree_tokens = tree_tokens
        self.slots = row_slots(max_tokens, tree_tokens)
        self.kv_slots = (kv_slots or rows * self.slots) // BLOCK_SLOTS * BLOCK_SLOTS
        self.tokens: Ints = np.zeros((rows, self.slots), dtype=np.int64)  # committed
        self.counts: Ints = np.zeros(rows, dtype=np.int64)  # n, committed tokens of each row
        self._most: Ints = np.zeros(rows, dtype=np.int64)  # tokens of each row; 0: it is free
        self._states: dict[str, ModelState] = {}
        width, blocks = self.slots // BLOCK_SLOTS, self.kv_slots // BLOCK_SLOTS
        self._tables = BlockTables(rows, width, blocks, self._states)
        self._sharing = PrefixSharing(self._tables, self._states, self.committed)

    @property
    def free_rows(self) -> int:
        return int((self._most == 0).sum())

    @property
    def is_bounded(self) -> bool:
        """Whether there is less than for as many of the longest requests as there are rows."""
        return self.kv_slots < self.rows * self.slots

    @property
    def free_slots(self) -> int:
        """That rows which begin may count on; what is cached goes where they want it."""
        return self._tables.unclaimed * BLOCK_SLOTS

    @property
    def held_slots(self) -> int:
        """Of blocks that rows have."""
        return (self._tables.blocks - self._tables.free) * BLOCK_SLOTS

    @property
    def cached_slots(self) -> int:
        """Of prefixes that nobody runs with."""
        return self._sharing.cache.blocks * BLOCK_SLOTS

    @property
    def cache_counts(self) -> CacheCounts:
        return self._sharing.cache.counts

    def slots_to_begin(self, tokens: int, most: int) -> int:
        """That a row with so many tokens needs to begin: for them, some more of its text, `most`
        tokens together at most, and a tree."""
        return min(row_slots(min(tokens + GROWTH_TOKENS, most), self.tree_tokens), self.slots)

    def can_ever_fit(self, tokens: int) -> bool:
        """Whether a row may come to have so many tokens, if it is alone."""
        slots = row_slots(tokens, self.tree_tokens)
        return tokens <= self.max_tokens and slots <= self.kv_slots

    def allocate(self, prompt: Sequence[int], most: int, use: CacheUse | None = None) -> int | None:
        """A free row, holding `prompt`, for `most` tokens; None where there is no row or memory to
        begin with.

        Every model has read what is cached of the prompt, but for its last token.
        """
        assert 0 < len(prompt) <= most <= self.slots
        free = np.flatnonzero(self._most == 0)
        blocks = self.slots_to_begin(len(prompt), most) // BLOCK_SLOTS
        if not len(free):
            return None
        row, found = int(free[0]), self._sharing.find(TokenChain(prompt), use or CacheUse())
        if blocks - self._sharing.held(found) > self._tables.unclaimed:
            return None
        self._tables.expected[row] = blocks
        self._most[row] = most
        self.counts[row] = len(prompt)
        self.tokens[row, : len(prompt)] = prompt
        try:
            self._sharing.begin(row, found)
        except BaseException:
            self.free(row)
            raise
        return row

    def grow(self, rows: Ints, slots: Ints, partly: bool = False) -> Ints:
        """Takes what rows lack of `slots[i]` slots, the first rows first; `partly`: or as much as
        there is. Returns the rows that lack some still."""
        return self._tables.grow(rows, slots, partly)

    def shrink(self) -> None:
        """Rows give back blocks in which they have no committed token, between cycles."""
        for row in np.flatnonzero(self._most).tolist():
            self._tables.shrink(row, -(-int(self.counts[row]) // BLOCK_SLOTS))

    def room(self, rows: Ints) -> Ints:
        """[R] slots that each row has behind its committed tokens."""
        return self._tables.sizes[rows] * BLOCK_SLOTS - self.counts[rows]

    def released_by(self, row: int) -> int:
        """Slots that rows which begin could count on if this one ended."""
        lacking = max(0, int(self._tables.expected[row] - self._tables.sizes[row]))
        return (self._tables.unshared(row) + lacking) * BLOCK_SLOTS

    def extend(self, row: int, tokens: Ints) -> None:
        """Commits tokens of a row."""
        count = int(self.counts[row])
        assert count + len(tokens) <= self._most[row], "more tokens than the row may have"
        self.tokens[row, count : count + len(tokens)] = tokens
        self.counts[row] = count + len(tokens)

    def free(self, row: int, keep: bool = False) -> None:
        """Gives a row back, in every model. `keep`: what it has read is good for others."""
        self._sharing.end(row, keep)
        for state in self._states.values():
            state.free(row)
        self._tables.end(row)
        self._most[row] = 0
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
        layers: Mapping[int, KVLayer],
        recurrent: Mapping[StateKey, RecurrentLayer] | None = None,
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
                if self._most[row]:
                    state.check_integrity(row, self.committed(row))
                else:
                    assert self.counts[row] == 0, f"free row {row} has tokens"
                    state.check_free(row)
            assert self.counts[row] <= self._most[row], f"row {row} overran"
