"""Block tables: where each row's slots lie in the memory that all rows and cached prefixes share.

Contract: a block is `BLOCK_SLOTS` slots, the same in every model's store, so one table serves all
models: row r's slot s is arena slot `table[r, s // BLOCK_SLOTS] * BLOCK_SLOTS + s % BLOCK_SLOTS`.
Tables and the prefix cache hold references; a block without any is free. A block with more than
one is not written to, but where a model has nothing in it yet: a row that must copies it first.
Rows take blocks as they grow. Cached ones that no row has go to whoever needs them.

Bookkeeping only: what lies in the blocks is in the stores of those who use them (`BlockUser`).
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from statemgr.arrays import Bools, Ints

BLOCK_SLOTS = 32  # a power of two


class NoFreeBlocksError(ValueError):
    """Rows have all the blocks."""


class BlockUser(Protocol):
    """A model's part of the blocks."""

    def copy_block(self, source: int, destination: int) -> None: ...

    def forget_blocks(self, blocks: Ints) -> None:
        """They are free: nothing in them is of use."""


class BlockCache(Protocol):
    """Who holds blocks for rows that may come.

    Attributes:
        is_cached: [blocks] those that it holds.
    """

    is_cached: Bools

    @property
    def blocks(self) -> int:
        """That no row has: so many `evict` gives back one by one."""

    def evict(self) -> bool:
        """Gives back a block that no row has; False: it holds none."""

    def uncache(self, block: int) -> None:
        """Gives back a block, if it holds it, and those that are of no use without it."""


class BlockTables:
    """The blocks, and a table of them for each row.

    Attributes:
        table: [rows, width] blocks; behind a row's own any valid ones.
        sizes: [rows] blocks that a row has.
        expected: [rows] blocks that it is likely to need: what it lacks of them is not for others
            to begin with.
        references: [blocks] by tables and the cache.
        cache: None: nothing is cached.
    """

    def __init__(
        self, rows: int, width: int, blocks: int, users: Mapping[str, BlockUser] | None = None
    ) -> None:
        self.table: NDArray[np.int32] = np.zeros((rows, width), dtype=np.int32)
        self.sizes: Ints = np.zeros(rows, dtype=np.int64)
        self.expected: Ints = np.zeros(rows, dtype=np.int64)
        self.references: Ints = np.zeros(blocks, dtype=np.int64)
        self.cache: BlockCache | None = None
        self._free = list(range(blocks - 1, -1, -1))
        self._users: Mapping[str, BlockUser] = {} if users is None else users

    @classmethod
    def whole(cls, rows: int, width: int) -> "BlockTables":
        """Of rows that may all be as long as a row can be."""
        return cls(rows, width, rows * width)

    @property
    def blocks(self) -> int:
        return len(self.references)

    @property
    def free(self) -> int:
        """Blocks that no row has."""
        return len(self._free) + (self.cache.blocks if self.cache is not None else 0)

    @property
    def unclaimed(self) -> int:
        """The same, without what rows are expected to take: for rows that begin."""
        return max(0, self.free - int(np.maximum(self.expected - self.sizes, 0).sum()))

    def flat(self, numbers: Ints) -> Ints:
        """Arena slots of slots by their numbers, `row * width * BLOCK_SLOTS + slot`."""
        blocks = self.table.reshape(-1)[numbers // BLOCK_SLOTS].astype(np.int64)
        slots: Ints = blocks * BLOCK_SLOTS + numbers % BLOCK_SLOTS
        return slots

    def of(self, row: int) -> Ints:
        """The row's blocks, a copy."""
        return self.table[row, : self.sizes[row]].astype(np.int64)

    def unshared(self, row: int) -> int:
        """Blocks that the row alone has: with the row's end they are free."""
        blocks = self.of(row)
        owners = self.references[blocks] - (self.cache.is_cached[blocks] if self.cache else 0)
        return int((owners == 1).sum())

    def grow(self, rows: Ints, slots: Ints, partly: bool = False) -> Ints:
        """Takes the blocks that rows lack for `slots[i]` slots, the first rows first; `partly`: or
        as many as there are. Returns the rows that lack some still."""
        needed = blocks_of(slots)
        lacking = []
        for at in np.flatnonzero(needed > self.sizes[rows]).tolist():
            row, size, wanted = int(rows[at]), int(self.sizes[rows[at]]), int(needed[at])
            most = min(wanted, size + self.free if partly else wanted, self.table.shape[1])
            taken = self.take(most - size) if most == wanted or partly else None
            if taken is not None:
                self.table[row, size:most] = taken
                self.sizes[row] = most
            if taken is None or most < wanted:
                lacking.append(row)
        return np.array(lacking, dtype=np.int64)

    def share(self, row: int, start: int, blocks: Ints) -> None:
        """From its block `start` on the row has these, which others have as well; what it had there
        goes."""
        self.references[blocks] += 1
        stop = start + len(blocks)
        self.release(self.table[row, start : min(stop, int(self.sizes[row]))].astype(np.int64))
        self.table[row, start:stop] = blocks
        self.sizes[row] = max(stop, int(self.sizes[row]))

    def unshare(self, row: int, index: int) -> bool:
        """Gives the row a copy of a block that others have as well, for it to write to; False: no
        block is free."""
        shared = int(self.table[row, index])
        taken = self.take(1)
        if taken is None:
            if self.cache is None or self.references[shared] - self.cache.is_cached[shared] > 1:
                return False
            self.cache.uncache(shared)  # no other row has it
            return True
        for user in self._users.values():
            user.copy_block(shared, int(taken[0]))
        self.table[row, index] = taken[0]
        self.release(np.array([shared]))
        return True

    def sharers(self, row: int, index: int) -> Bools:
        """[rows] other rows that have one of the row's blocks. It has the same place in all."""
        has: Bools = (self.sizes > index) & (self.table[:, index] == self.table[row, index])
        has[row] = False
        return has

    def shrink(self, row: int, size: int) -> None:
        """A row gives back its blocks from number `size` on."""
        blocks = self.of(row)[size:]
        self.sizes[row] -= len(blocks)
        self.release(blocks)

    def end(self, row: int) -> None:
        """A row gives back all of its blocks, and what it was expected to need."""
        self.expected[row] = 0
        self.shrink(row, 0)

    def take(self, count: int) -> Ints | None:
        """So many blocks, each with one reference; None: there are fewer."""
        if len(self._free) < count and self.free < count:
            return None
        while len(self._free) < count:
            assert self.cache is not None, "blocks were miscounted"
            assert self.cache.evict(), "blocks were miscounted"
        taken = np.array(self._free[len(self._free) - count :], dtype=np.int64)
        del self._free[len(self._free) - count :]
        self.references[taken] = 1
        return taken

    def hold(self, blocks: Ints) -> None:
        """One more reference to each of these blocks, which differ."""
        self.references[blocks] += 1

    def release(self, blocks: Ints) -> None:
        """One reference less to each of these blocks, which differ."""
        self.references[blocks] -= 1
        free = blocks[self.references[blocks] == 0]
        if len(free):
            self._free += free.tolist()
            for user in self._users.values():
                user.forget_blocks(free)

    def check_integrity(self, cached: Ints) -> None:
        """Asserts that every block is free, or referenced by as many as hold it. `cached`: blocks
        that the cache holds, each once."""
        rows = range(len(self.sizes))
        held = np.concatenate([cached, *map(self.of, rows)])
        counts = np.bincount(held, minlength=self.blocks)
        assert np.array_equal(counts, self.references), "references were miscounted"
        free = np.flatnonzero(counts == 0).tolist()
        assert sorted(self._free) == free, "a block is lost, or free twice"


def blocks_of(slots: Ints) -> Ints:
    """[n] blocks that hold so many slots."""
    blocks: Ints = -(-slots // BLOCK_SLOTS)
    return blocks


def whole_blocks(slots: int) -> int:
    """The least whole blocks' slots that so many fit in."""
    return -(-slots // BLOCK_SLOTS) * BLOCK_SLOTS
