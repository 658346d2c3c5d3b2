"""Arena: who has which blocks of the memory that all rows and cached prefixes share.

A block is `KV_QUANTUM` slots. Every model's store has the same blocks, so that a row has one place
in all of them. Bookkeeping only: what stands in the slots moves in the stores (`StateManager`).
"""

import numpy as np

from statemgr.arrays import Ints

KV_QUANTUM = 128  # slots
BLOCK_SLOTS = 32  # slots of a block as attention reads them
NOBODY = -1


class Arena:
    """Owners are numbers, each with one extent of consecutive blocks at most."""

    def __init__(self, blocks: int) -> None:
        self._owner: Ints = np.full(blocks, NOBODY)

    @property
    def blocks(self) -> int:
        return len(self._owner)

    @property
    def free_blocks(self) -> int:
        return int((self._owner == NOBODY).sum())

    def owners(self, start: int, blocks: int) -> list[int]:
        """Who has any of these blocks, ascending; without `NOBODY`."""
        found: list[int] = np.unique(self._owner[start : start + blocks]).tolist()
        return found[1:] if found[:1] == [NOBODY] else found

    def extent(self, owner: int) -> tuple[int, int]:
        """First block and their number; 0 of who has none."""
        own = np.flatnonzero(self._owner == owner)
        return (int(own[0]), len(own)) if len(own) else (0, 0)

    def give(self, owner: int, start: int, blocks: int) -> None:
        """Blocks that nobody has."""
        assert start + blocks <= self.blocks, "there are no such blocks"
        assert not self.owners(start, blocks), "blocks are taken"
        self.claim(owner, start, blocks)

    def claim(self, owner: int, start: int, blocks: int, before: int = NOBODY) -> None:
        """Of these blocks those that `before` has."""
        part = self._owner[start : start + blocks]
        part[part == before] = owner

    def take_back(self, owner: int) -> None:
        self._owner[self._owner == owner] = NOBODY

    def gap(self, blocks: int, *, last: bool = False, also: int = NOBODY) -> int | None:
        """Where so many consecutive blocks are free: the first such place, or the last.

        `also`: whose blocks count as free.
        """
        free = (self._owner == NOBODY) | (self._owner == also)
        edges = np.flatnonzero(np.diff(np.concatenate(([False], free, [False]))))
        starts, stops = edges[::2], edges[1::2]
        fits = np.flatnonzero(stops - starts >= blocks)
        if not len(fits):
            return None
        return int(stops[fits[-1]]) - blocks if last else int(starts[fits[0]])


def blocks_of(slots: int) -> int:
    """That hold so many slots."""
    return -(-slots // KV_QUANTUM)
