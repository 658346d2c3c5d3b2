"""Rows, their memory, and their committed tokens, of which every model's state holds a prefix.

Contract: a row belongs to one running request, in all models. It begins if there are blocks for its
prompt and a margin, and takes more as its text grows; if none are left, a row has to end. Model
states are created on first use and may be dropped at any time: a dropped or lagging state catches
up by reading committed tokens again. Tokens that a row has read are kept when it ends, as far as
there is memory, for rows that begin with the same tokens under the same salt (`PrefixSharing`).

This module does not know which models exist, what they are for, or when a token is accepted.
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

GROWTH_TOKENS = 64  # tokens after its prompt that a row is expected to need blocks for


def row_slots(max_tokens: int, tree_tokens: int = 0) -> int:
    """Return the slots of a row for its tokens and the nodes of a tree, in whole blocks."""
    return whole_blocks(max_tokens + tree_tokens)


def row_tokens(slots: int, tree_tokens: int = 0) -> int:
    """Return the most tokens of a row for which `row_slots` is at most `slots`, or 0."""
    return max(0, slots // BLOCK_SLOTS * BLOCK_SLOTS - tree_tokens)


class StateManager:
    """Rows of the running requests, with their tokens, blocks and model states.

    Args:
        max_tokens: most tokens of a row, committed and drafted ones up to the request's length.
        tree_tokens: slots of each row beyond its tokens, for the nodes of a token tree.
        kv_slots: slots of every model's store; None: enough for all rows at maximum length.
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
        self.counts: Ints = np.zeros(rows, dtype=np.int64)  # committed tokens of each row
        self._most: Ints = np.zeros(rows, dtype=np.int64)  # token limit of each row; 0: it is free
        self._states: dict[str, ModelState] = {}
        width, blocks = self.slots // BLOCK_SLOTS, self.kv_slots // BLOCK_SLOTS
        self._tables = BlockTables(rows, width, blocks, self._states)
        self._sharing = PrefixSharing(self._tables, self._states, self.committed)

    @property
    def free_rows(self) -> int:
        return int((self._most == 0).sum())

    @property
    def is_bounded(self) -> bool:
        """True if there are fewer slots than all rows need at maximum length."""
        return self.kv_slots < self.rows * self.slots

    @property
    def free_slots(self) -> int:
        """Slots that new rows may count on; cached blocks are evicted for them."""
        return self._tables.unclaimed * BLOCK_SLOTS

    @property
    def held_slots(self) -> int:
        """Slots of the blocks that rows have."""
        return (self._tables.blocks - self._tables.free) * BLOCK_SLOTS

    @property
    def cached_slots(self) -> int:
        """Slots of cached prefixes that no running row has."""
        return self._sharing.cache.blocks * BLOCK_SLOTS

    @property
    def cache_counts(self) -> CacheCounts:
        return self._sharing.cache.counts

    def slots_to_begin(self, tokens: int, most: int) -> int:
        """Return the slots that a row with `tokens` tokens needs to begin.

        They are for these tokens and some more, at most `most` tokens together, and for a tree.
        """
        return min(row_slots(min(tokens + GROWTH_TOKENS, most), self.tree_tokens), self.slots)

    def can_ever_fit(self, tokens: int) -> bool:
        """Return whether a row can have `tokens` tokens if it runs alone."""
        slots = row_slots(tokens, self.tree_tokens)
        return tokens <= self.max_tokens and slots <= self.kv_slots

    def allocate(self, prompt: Sequence[int], most: int, use: CacheUse | None = None) -> int | None:
        """Allocate a row that holds `prompt` and may have `most` tokens.

        Every model counts the cached part of the prompt as read, except for its last token. Returns
        None if no row is free, or memory is too short to begin.
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
        """Give rows the blocks that they lack for `slots[i]` slots, the first rows first.

        With `partly`, a row takes as many as are free if there are too few. Returns the rows that
        still lack some.
        """
        return self._tables.grow(rows, slots, partly)

    def shrink(self) -> None:
        """Give back the blocks of rows that have no committed token; call it between cycles."""
        for row in np.flatnonzero(self._most).tolist():
            self._tables.shrink(row, -(-int(self.counts[row]) // BLOCK_SLOTS))

    def room(self, rows: Ints) -> Ints:
        """Return the slots, [R], that each row has after its committed tokens."""
        return self._tables.sizes[rows] * BLOCK_SLOTS - self.counts[rows]

    def released_by(self, row: int) -> int:
        """Return the slots that new rows could count on if this row ended."""
        lacking = max(0, int(self._tables.expected[row] - self._tables.sizes[row]))
        return (self._tables.unshared(row) + lacking) * BLOCK_SLOTS

    def extend(self, row: int, tokens: Ints) -> None:
        """Append committed tokens to a row."""
        count = int(self.counts[row])
        assert count + len(tokens) <= self._most[row], "more tokens than the row may have"
        self.tokens[row, count : count + len(tokens)] = tokens
        self.counts[row] = count + len(tokens)

    def free(self, row: int, keep: bool = False) -> None:
        """Give a row back in every model; with `keep`, cache what it has read for others."""
        self._sharing.end(row, keep)
        for state in self._states.values():
            state.free(row)
        self._tables.end(row)
        self._most[row] = 0
        self.counts[row] = 0

    def committed(self, row: int) -> Ints:
        """Return the committed tokens of a row, [n], not copied."""
        return self.tokens[row, : self.counts[row]]

    # Prefixes

    def follow(self) -> list[int]:
        """Let rows take over what others have read meanwhile of a prompt that they share.

        Returns the rows that took over tokens in any model. Call it between cycles.
        """
        return self._sharing.follow()

    def leaders(self) -> dict[int, tuple[int, int]]:
        """Return by row the row that it may wait for, and the tokens that it will take over.

        The leader reads the tokens that both rows begin with.
        """
        return self._sharing.leaders()

    def waits(self, name: str, rows: Ints) -> Bools:
        """Return a mask, [R], of rows that should not read with a model now.

        A row before them in `rows` reads the same tokens for them, in a block that they share.
        """
        return self._sharing.waits(name, rows)

    def inherited(self, row: int, model: str | None = None) -> int:
        """Return the tokens of a row that a model took over; None: the most of any model."""
        return self._sharing.inherited(row, model)

    def cached(self, chain: TokenChain, use: CacheUse) -> dict[str, int]:
        """Return by model how many tokens of a text it need not read, thanks to the cache."""
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
        """Return a model's state, which is created on first use.

        With `is_target`, this model decides what rows take over, and how long they follow others.
        """
        if name not in self._states:
            tables, wanted = self._tables, self._sharing.wanted
            self._states[name] = ModelState(
                layers, self.rows, self.slots, tables, recurrent, wanted
            )
            if is_target:
                self._sharing.target = name
        return self._states[name]

    def drop_state(self, name: str) -> None:
        """Forget a model's state, for example because the model is evicted."""
        if self._states.pop(name, None) is not None:
            self._sharing.forget_model(name)

    def check_integrity(self) -> None:
        """Assert every invariant that holds between cycles."""
        self._sharing.check_integrity()
        for row in range(self.rows):
            for state in self._states.values():
                if self._most[row]:
                    state.check_integrity(row, self.committed(row))
                else:
                    assert self.counts[row] == 0, f"free row {row} has tokens"
                    state.check_free(row)
            assert self.counts[row] <= self._most[row], f"row {row} overran"
