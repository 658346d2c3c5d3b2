"""Rows, reservations and the committed tokens that every model's state is a prefix of.

Contract: a row belongs to one running request, in all models. What a request may need is reserved
when it is admitted, so a running request never fails for KV memory. Model states come into being
on first use and may be dropped at any time: a dropped or lagging state catches up by
re-reading committed tokens. What a row that ends has read is kept, as far as there is memory, for
rows that begin with the same tokens under the same salt (`PrefixCache`, `PrefixSharing`).

Not here: which models there are, what they are for, and when a token is accepted.
"""

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from statemgr.arena import KV_QUANTUM, blocks_of
from statemgr.arrays import Ints
from statemgr.kv_placement import KVPlacement
from statemgr.kv_store import LayerShape
from statemgr.layer_state import KEPT_STATES, RecurrentShape, StateKey
from statemgr.model_state import ModelState
from statemgr.prefix_cache import CacheCounts, CacheUse, PrefixCache, TokenChain
from statemgr.prefix_sharing import PrefixSharing
from statemgr.row_layout import RowLayout

logger = logging.getLogger(__name__)


def row_slots(max_tokens: int, tree_tokens: int = 0) -> int:
    """Slots of a row for so many tokens and the nodes of a tree beside them: whole quanta."""
    return -(-(max_tokens + tree_tokens) // KV_QUANTUM) * KV_QUANTUM


def row_tokens(slots: int, tree_tokens: int = 0) -> int:
    """The most tokens that a row may have for `row_slots` to be at most `slots`; 0: none."""
    return max(0, slots // KV_QUANTUM * KV_QUANTUM - tree_tokens)


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
        self.kv_slots = (kv_slots or rows * self.slots) // KV_QUANTUM * KV_QUANTUM
        self.budget_tokens = budget_tokens
        self.tokens: Ints = np.zeros((rows, self.slots), dtype=np.int64)  # committed
        self.counts: Ints = np.zeros(rows, dtype=np.int64)  # n, committed tokens of each row
        self._reserved: Ints = np.zeros(rows, dtype=np.int64)  # 0: the row is free
        self._states: dict[str, ModelState] = {}
        share = self.kv_slots // rows // KV_QUANTUM * KV_QUANTUM
        stride = max(KV_QUANTUM, min(share, self.slots))
        self._layout = RowLayout.empty(rows, self.slots, self.kv_slots, stride)
        self._cache = PrefixCache()
        self._placement = KVPlacement(self._layout, self._cache, self._states)
        self._sharing = PrefixSharing(self._cache, self._states, self.committed)

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
        return self._placement.free_blocks * KV_QUANTUM

    @property
    def cached_slots(self) -> int:
        """Of prefixes that nobody runs with."""
        return self._cache.blocks * KV_QUANTUM

    @property
    def cache_counts(self) -> CacheCounts:
        return self._cache.counts

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
        blocks = blocks_of(min(self.slots_for(reserve), self.slots))
        budget = self.budget_tokens
        if not len(free) or (budget is not None and self.reserved_tokens + reserve > budget):
            return None
        if blocks > self._placement.free_blocks:
            return None
        found = self._sharing.find(TokenChain(prompt), use or CacheUse())
        origin = found.entry
        if origin is not None and found.shared >= origin.longest:  # the row's own will say all
            self._placement.leave(origin)
        row, left = self._placement.place(free, blocks, origin)
        self._reserved[row] = reserve
        self.counts[row] = len(prompt)
        self.tokens[row, : len(prompt)] = prompt
        self._sharing.begin(row, found, is_there=left is origin)
        self._placement.settle()
        return row

    def extend(self, row: int, tokens: Ints) -> None:
        """Commits tokens of a row."""
        count = int(self.counts[row])
        assert count + len(tokens) <= self._reserved[row], "more tokens than were reserved"
        self.tokens[row, count : count + len(tokens)] = tokens
        self.counts[row] = count + len(tokens)

    def free(self, row: int, keep: bool = False) -> None:
        """Gives a row back, in every model. `keep`: what it has read is good for others."""
        salt = self._sharing.end(row)
        if not (keep and salt is not None and self._keep(row, salt)):
            for state in self._states.values():
                state.free(row)
            self._placement.release(row)
        self._reserved[row] = 0
        self.counts[row] = 0

    def committed(self, row: int) -> Ints:
        """[n], not copied."""
        return self.tokens[row, : self.counts[row]]

    # Prefixes

    def follow(self) -> list[int]:
        """Rows copy what others have read meanwhile of the prompt that they share. Returns those
        that copied anything, in any model. For the time between cycles."""
        return self._sharing.follow()

    def leaders(self) -> dict[int, tuple[int, int]]:
        """By row: the one that reads what both begin with, whom it may wait for, and how many
        tokens that will be."""
        return self._sharing.leaders()

    def inherited(self, row: int, model: str | None = None) -> int:
        """Tokens of a row that a model did not read for it; None: the one with the most."""
        return self._sharing.inherited(row, model)

    def cached(self, chain: TokenChain, use: CacheUse) -> dict[str, int]:
        """By model: tokens that it would not have to read again, of what no row runs with."""
        return self._sharing.cached(chain, use).lengths

    def _keep(self, row: int, salt: str) -> bool:
        try:
            kept = {name: state.kept(row) for name, state in self._states.items()}
            read = {name: state.park(row) for name, state in self._states.items()}
        except Exception:
            logger.exception("row %d is not kept", row)
            self._cache.counts.failures += 1
            return False
        lengths = {name: length for name, length in read.items() if length}
        if not lengths:
            return False
        states = {name: each for name in lengths if (each := kept[name]) is not None}
        chain = TokenChain(self.committed(row)[: max(lengths.values())])
        known = self._cache.find(chain, len(chain.tokens), salt)
        if known is not None:
            entry, shared, _ = known
            if _covers(entry.lengths, shared, lengths):
                self._cache.touch(entry)
                entry.take_over(states, shared)
                self._trim_states()
                return False
            if _covers(lengths, shared, entry.lengths):
                self._placement.drop(entry)
                for name, each in entry.states.items():
                    states[name] = {**each, **states[name]}
        self._placement.keep(row, chain, salt, lengths, states)
        self._trim_states()
        return True

    def _trim_states(self) -> None:
        """Cached prefixes have room for so many recurrent states as rows that run."""
        for name in self._states:
            for entry in self._cache.trim_states(name, KEPT_STATES * self.rows):
                self._placement.shrink(entry)

    # States

    def state(self, name: str) -> ModelState | None:
        return self._states.get(name)

    def open_state(
        self,
        name: str,
        layers: Mapping[int, LayerShape],
        canonical: bool = False,
        recurrent: Mapping[StateKey, RecurrentShape] | None = None,
    ) -> ModelState:
        """A model's state, created on first use."""
        if name not in self._states:
            self._states[name] = ModelState(
                layers,
                self.rows,
                self.slots,
                canonical,
                self._layout,
                recurrent,
                self._sharing.wanted,
            )
        return self._states[name]

    def drop_state(self, name: str) -> None:
        """Forgets a model's cache, as when the model is evicted."""
        self._states.pop(name, None)
        for entry in self._cache.forget_model(name):
            self._placement.shrink(entry)

    def check_integrity(self) -> None:
        """Asserts every invariant; for the time between cycles."""
        self._placement.check_integrity()
        self._cache.check_integrity()
        for row in range(self.rows):
            for state in self._states.values():
                if self._reserved[row]:
                    state.check_integrity(row, self.committed(row))
                else:
                    assert self.counts[row] == 0, f"free row {row} has tokens"
                    state.check_free(row)
            assert self.counts[row] <= max(self._reserved[row], 0), f"row {row} overran"
        assert self.budget_tokens is None or self.reserved_tokens <= self.budget_tokens


def _covers(ours: dict[str, int], shared: int, theirs: dict[str, int]) -> bool:
    """Whether, of texts that share so many tokens, one has read all that the other has."""
    return all(min(ours.get(name, 0), shared) >= length for name, length in theirs.items())
