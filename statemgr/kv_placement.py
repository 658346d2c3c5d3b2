"""KVPlacement: gives rows their extents, and makes room for them among cached prefixes.

Contract: rows that run stand where attention reads them together: each at a place of its own, its
home, at equal distances, the lowest rows first. What is cached there moves to where nobody runs.
Prefixes are dropped, the least recently used first, where there is no such place; only where homes
are too short for what runs do rows stand elsewhere, and move together when nothing else helps.
"""

from collections.abc import Mapping

import numpy as np

from statemgr.arena import KV_QUANTUM, Arena, blocks_of
from statemgr.arrays import Ints
from statemgr.layer_state import KeptState
from statemgr.model_state import ModelState
from statemgr.prefix_cache import CachedPrefix, PrefixCache, TokenChain
from statemgr.row_layout import RowLayout


class KVPlacement:
    """Args: `states`: by name, of the models that have a store now; they share `layout`."""

    def __init__(
        self, layout: RowLayout, cache: PrefixCache, states: Mapping[str, ModelState]
    ) -> None:
        self.arena = Arena(layout.total // KV_QUANTUM)
        self._layout = layout
        self._cache = cache
        self._states = states
        self._stride = layout.stride // KV_QUANTUM
        self._next_owner = len(layout.starts)  # of a prefix; rows own by their numbers
        self._leaving: CachedPrefix | None = None  # no prefix any more, but it still stands there

    @property
    def free_blocks(self) -> int:
        """That rows could have, cached prefixes dropped."""
        return self.arena.free_blocks + self._cache.blocks

    def place(
        self, rows: Ints, blocks: int, origin: CachedPrefix | None
    ) -> tuple[int, CachedPrefix | None]:
        """Gives one of `rows`, which ascend, so many blocks, of at most `free_blocks`.

        Args:
            origin: what the row will be copied from. It stays as it is until `settle`, and then
                only if no room had to be made of it.

        Returns:
            the row, and `origin` unless even that had to go.
        """
        try:
            row, start, origin = self._find_place(rows, blocks, origin)
        except BaseException:  # free rows have nothing again, whatever has moved
            for each in rows.tolist():
                self.arena.take_back(each)
            self.settle()
            raise
        self._layout.place(row, start * KV_QUANTUM, blocks * KV_QUANTUM)
        return row, origin

    def _find_place(
        self, rows: Ints, blocks: int, origin: CachedPrefix | None
    ) -> tuple[int, int, CachedPrefix | None]:
        """The row, its first block, and `origin` unless that had to go."""
        row = next((each for each in rows.tolist() if self._has_home(each, blocks)), None)
        if row is not None:
            row = self._spared(row, rows, blocks)
            start = row * self._stride
            self._clear(row, start, blocks, origin)
        else:
            row = int(rows[0])
            start, origin = self._make_gap(blocks, origin)
            self._take(row, start, blocks)
        return row, start, origin

    def leave(self, entry: CachedPrefix) -> None:
        """A prefix is found no longer; its blocks may go to the row that is placed next."""
        assert self._leaving is None, "one leaves at a time"
        self._cache.remove(entry)
        self._leaving = entry

    def settle(self) -> None:
        """What left is not needed any more."""
        if self._leaving is not None:
            self.arena.take_back(self._leaving.owner)
            self._leaving = None

    def keep(
        self,
        row: int,
        chain: TokenChain,
        salt: str,
        lengths: dict[str, int],
        states: dict[str, dict[int, KeptState]],
    ) -> CachedPrefix:
        """Makes a prefix of what a row holds, and gives back the rest of its extent."""
        start, blocks = int(self._layout.starts[row]) // KV_QUANTUM, blocks_of(len(chain.tokens))
        self.release(row)
        entry = CachedPrefix(
            owner=self._next_owner,
            salt=salt,
            chain=chain,
            start=start,
            blocks=blocks,
            lengths=lengths,
            states=states,
        )
        self._next_owner += 1
        self.arena.give(entry.owner, start, blocks)
        self._cache.add(entry)
        return entry

    def release(self, row: int) -> None:
        """Takes a row's extent back."""
        self.arena.take_back(row)
        self._layout.place(row, 0, 0)

    def drop(self, entry: CachedPrefix) -> None:
        """What it holds is finite, so nobody needs it cleared."""
        self._cache.remove(entry)
        self.arena.take_back(entry.owner)

    def shrink(self, entry: CachedPrefix) -> None:
        """Takes back the blocks that a prefix which became shorter needs no more."""
        if not entry.longest:
            self.drop(entry)
            return
        entry.blocks = blocks_of(entry.longest)
        self.arena.take_back(entry.owner)
        self.arena.give(entry.owner, entry.start, entry.blocks)

    def check_integrity(self) -> None:
        """Asserts that nothing has blocks but rows and prefixes, each its own."""
        assert self._leaving is None, "a prefix is on its way"
        taken = 0
        for row, size in enumerate(self._layout.sizes.tolist()):
            start = int(self._layout.starts[row]) // KV_QUANTUM
            extent = (start, size // KV_QUANTUM) if size else (0, 0)
            assert self.arena.extent(row) == extent, f"row {row} stands elsewhere"
            taken += extent[1]
        for entry in self._cache:
            assert self.arena.extent(entry.owner) == (entry.start, entry.blocks), "a prefix"
            taken += entry.blocks
        assert taken + self.arena.free_blocks == self.arena.blocks, "blocks of nobody are taken"

    def _has_home(self, row: int, blocks: int) -> bool:
        """Whether nobody runs where it would stand."""
        start = row * self._stride
        owners = self.arena.owners(start, blocks)
        is_inside = start + blocks <= self.arena.blocks
        return is_inside and (not owners or owners[0] >= len(self._layout.starts))

    def _spared(self, row: int, rows: Ints, blocks: int) -> int:
        """The row, or the one whose home is where a prefix leaves, if prefixes would have to go for
        the first one."""
        leaving = self._leaving
        if leaving is None or leaving.start % self._stride:
            return row
        own, start = leaving.start // self._stride, leaving.start
        is_clear = self.arena.owners(start, blocks) == [leaving.owner]
        if own not in rows or not is_clear or start + blocks > self.arena.blocks:
            return row
        others = self.arena.owners(row * self._stride, blocks)
        blocked = [self._cache[each].blocks for each in others if each in self._cache]
        has_gap = all(self.arena.gap(each) is not None for each in blocked)
        return row if has_gap else own

    def _clear(self, row: int, start: int, blocks: int, origin: CachedPrefix | None) -> None:
        """Gives blocks to a row, of which others are prefixes'."""
        self._take(row, start, blocks)
        while others := [each for each in self.arena.owners(start, blocks) if each != row]:
            self._move_away(self._cache[others[0]], origin)
            self._take(row, start, blocks)  # before anything else moves there

    def _take(self, row: int, start: int, blocks: int) -> None:
        """Free ones, and those of what leaves."""
        self.arena.claim(row, start, blocks)
        if self._leaving is not None:
            self.arena.claim(row, start, blocks, before=self._leaving.owner)

    def _move_away(self, entry: CachedPrefix, origin: CachedPrefix | None) -> None:
        """Or what is older goes, of which some may have been in the way as well."""
        start = self.arena.gap(entry.blocks, last=True)
        if start is None:
            oldest = self._cache.oldest(but=origin)
            if oldest is None:  # then it is the origin itself
                self.leave(entry)
            else:
                self._evict(oldest)
            return
        for name, length in entry.lengths.items():
            run = np.arange(length)
            store = self._states[name].store
            store.move(entry.start * KV_QUANTUM + run, start * KV_QUANTUM + run)
        self.arena.take_back(entry.owner)
        self.arena.give(entry.owner, start, entry.blocks)
        entry.start = start

    def _make_gap(
        self, blocks: int, origin: CachedPrefix | None
    ) -> tuple[int, CachedPrefix | None]:
        """Where so many consecutive blocks are free, or those of what leaves."""
        while True:
            also = -1 if self._leaving is None else self._leaving.owner
            start = self.arena.gap(blocks, also=also)
            if start is not None:
                return start, origin
            oldest = self._cache.oldest(but=origin)
            if oldest is not None:
                self._evict(oldest)
            elif origin is not None and self._leaving is None:
                self.leave(origin)
            else:  # what is free is in pieces
                self.settle()
                self._compact()
                origin = None

    def _compact(self) -> None:
        """Moves all rows together. There are no prefixes."""
        layout = self._layout
        placed = np.flatnonzero(layout.sizes)
        start = 0
        for row in placed[np.argsort(layout.starts[placed])].tolist():
            size = int(layout.sizes[row])
            for state in self._states.values():
                state.carry(row, start)
            self.arena.take_back(row)
            self.arena.give(row, start // KV_QUANTUM, size // KV_QUANTUM)
            layout.place(row, start, size)
            start += size

    def _evict(self, entry: CachedPrefix) -> None:
        self.drop(entry)
        self._cache.counts.evictions += 1
