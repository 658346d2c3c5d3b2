"""Block tables, which map each row's slots to the memory that all rows and cached prefixes share.

Contract: a block has `BLOCK_SLOTS` slots, the same number in every model's store, so one table
serves all models: slot s of row r is arena slot
`table[r, s // BLOCK_SLOTS] * BLOCK_SLOTS + s % BLOCK_SLOTS`. Tables and the prefix cache hold
references to blocks; a block without references is free. A block with several references is not
written to, except by a model that has not filled it yet: a row that must write to it copies it
first. Rows take blocks as they grow. Cached blocks that no row has are evicted when blocks are
needed.

This module does the bookkeeping only: the contents of blocks are in the stores of their users
(`BlockUser`).
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from statemgr.arrays import Bools, Ints

BLOCK_SLOTS = 32  # a power of two


class NoFreeBlocksError(ValueError):
    """Error raised when rows hold all the blocks."""


class BlockUser(Protocol):
    """A user of the blocks that keeps data for them, such as a model's state."""

    def copy_block(self, source: int, destination: int) -> None: ...

    def forget_blocks(self, blocks: Ints) -> None:
        """Forget the contents of blocks that have become free."""


class BlockCache(Protocol):
    """Protocol of a cache that holds blocks for later rows.

    Attributes:
        is_cached: [blocks] True for the blocks that the cache holds.
    """

    is_cached: Bools

    @property
    def blocks(self) -> int:
        """Number of cached blocks that no row has; `evict` can give back each of them."""

    def evict(self) -> bool:
        """Give back a block that no row has; return False if there is none."""

    def uncache(self, block: int) -> None:
        """Give back a block, if it is cached, and the cached blocks that depend on it."""


class BlockTables:
    """Blocks, their reference counts, and a table of blocks for each row.

    Attributes:
        table: [rows, width] blocks; entries beyond a row's own blocks are any valid ones.
        sizes: [rows] number of blocks that each row has.
        expected: [rows] number of blocks that each row is likely to need; those that it still lacks
            are not available to rows that begin.
        references: [blocks] number of references from tables and the cache.
        cache: the prefix cache; None if nothing is cached.
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
        """Create tables with enough blocks for all rows to have the maximum length."""
        return cls(rows, width, rows * width)

    @property
    def blocks(self) -> int:
        return len(self.references)

    @property
    def free(self) -> int:
        """Number of blocks that no row has, cached ones included."""
        return len(self._free) + (self.cache.blocks if self.cache is not None else 0)

    @property
    def unclaimed(self) -> int:
        """Number of free blocks that running rows are not expected to take, for new rows."""
        return max(0, self.free - int(np.maximum(self.expected - self.sizes, 0).sum()))

    def flat(self, numbers: Ints) -> Ints:
        """Map slot numbers, `row * width * BLOCK_SLOTS + slot`, to arena slots."""
        blocks = self.table.reshape(-1)[numbers // BLOCK_SLOTS].astype(np.int64)
        slots: Ints = blocks * BLOCK_SLOTS + numbers % BLOCK_SLOTS
        return slots

    def of(self, row: int) -> Ints:
        """Return a copy of the row's blocks."""
        return self.table[row, : self.sizes[row]].astype(np.int64)

    def unshared(self, row: int) -> int:
        """Count the blocks that no other row has; they are free once this row ends."""
        blocks = self.of(row)
        owners = self.references[blocks] - (self.cache.is_cached[blocks] if self.cache else 0)
        return int((owners == 1).sum())

    def grow(self, rows: Ints, slots: Ints, partly: bool = False) -> Ints:
        """Give rows the blocks that they lack for `slots[i]` slots, the first rows first.

        With `partly`, a row takes as many as are free if there are too few. Returns the rows that
        still lack some.
        """
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
        """Set the row's blocks from index `start` on to blocks that others have as well.

        The blocks that the row had there are released.
        """
        self.references[blocks] += 1
        stop = start + len(blocks)
        self.release(self.table[row, start : min(stop, int(self.sizes[row]))].astype(np.int64))
        self.table[row, start:stop] = blocks
        self.sizes[row] = max(stop, int(self.sizes[row]))

    def unshare(self, row: int, index: int) -> bool:
        """Give the row a copy of a block that others have as well, so that it can write to it.

        If no block is free for the copy and no other row has this one, the cache gives it up
        instead. Returns False if no block is free.
        """
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
        """Return a mask, [rows], of the other rows that have the row's block at `index`.

        A shared block has the same index in all rows.
        """
        has: Bools = (self.sizes > index) & (self.table[:, index] == self.table[row, index])
        has[row] = False
        return has

    def shrink(self, row: int, size: int) -> None:
        """Release the row's blocks from index `size` on."""
        blocks = self.of(row)[size:]
        self.sizes[row] -= len(blocks)
        self.release(blocks)

    def end(self, row: int) -> None:
        """Release all blocks of a row and reset the number that it is expected to need."""
        self.expected[row] = 0
        self.shrink(row, 0)

    def take(self, count: int) -> Ints | None:
        """Take `count` blocks with one reference each; return None if fewer are free."""
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
        """Add one reference to each of these blocks, which must be distinct."""
        self.references[blocks] += 1

    def release(self, blocks: Ints) -> None:
        """Remove one reference from each of these blocks, which must be distinct."""
        self.references[blocks] -= 1
        free = blocks[self.references[blocks] == 0]
        if len(free):
            self._free += free.tolist()
            for user in self._users.values():
                user.forget_blocks(free)

    def check_integrity(self, cached: Ints) -> None:
        """Assert that every block is free, or has as many references as holders.

        `cached` lists the blocks that the cache holds, each once.
        """
        rows = range(len(self.sizes))
        held = np.concatenate([cached, *map(self.of, rows)])
        counts = np.bincount(held, minlength=self.blocks)
        assert np.array_equal(counts, self.references), "references were miscounted"
        free = np.flatnonzero(counts == 0).tolist()
        assert sorted(self._free) == free, "a block is lost, or free twice"


def blocks_of(slots: Ints) -> Ints:
    """Return the numbers of blocks, [n], that hold these numbers of slots."""
    blocks: Ints = -(-slots // BLOCK_SLOTS)
    return blocks


def whole_blocks(slots: int) -> int:
    """Round a number of slots up to whole blocks."""
    return -(-slots // BLOCK_SLOTS) * BLOCK_SLOTS
