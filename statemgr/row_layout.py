"""RowLayout: where each row's slots stand among the flat slots of the stores.

Contract: row r's slot s, of `sizes[r]`, is flat slot `starts[r] + s`. From its start `reach[r]`
slots may be read, its own among them: no other row that runs has any of the others, so what stands
there is finite, and masked. All models of a `StateManager` have the same layout.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from statemgr.arena import BLOCK_SLOTS
from statemgr.arrays import Ints


@dataclass(eq=False, kw_only=True)
class RowLayout:
    """
    Attributes:
        starts, sizes, reach: [rows], in slots.
        width: slots that a row has at most; a row's slots are numbered `row * width + slot`.
        stride: slots from the usual place of a row to that of the next one.
        total: slots of a store.
    """

    starts: Ints
    sizes: Ints
    reach: Ints
    width: int
    stride: int
    total: int

    @classmethod
    def grid(cls, rows: int, width: int) -> "RowLayout":
        """All rows as long as one can be, one behind the other."""
        sizes = np.full(rows, width)
        return cls(
            starts=np.arange(rows) * width,
            sizes=sizes,
            reach=sizes.copy(),
            width=width,
            stride=width,
            total=rows * width,
        )

    @classmethod
    def empty(cls, rows: int, width: int, total: int, stride: int) -> "RowLayout":
        """Rows without any slots."""
        nothing = np.zeros(rows, dtype=np.int64)
        return cls(
            starts=np.arange(rows) * stride,
            sizes=nothing,
            reach=nothing.copy(),
            width=width,
            stride=stride,
            total=total,
        )

    def flat(self, numbers: Ints) -> Ints:
        """Flat slots of slots by their numbers."""
        rows = numbers // self.width
        slots: Ints = self.starts[rows] + numbers - rows * self.width
        return slots

    def tables(self, rows: Ints, slots: int) -> NDArray[np.int32]:
        """[R, N] the blocks of rows, as far as so many slots."""
        blocks = np.arange(-(-slots // BLOCK_SLOTS), dtype=np.int32)
        return (self.starts[rows, None] // BLOCK_SLOTS + blocks).astype(np.int32)

    def place(self, row: int, start: int, slots: int) -> None:
        """Gives a row its extent; no slots take it."""
        self.starts[row] = start
        self.sizes[row] = slots
        placed = np.flatnonzero(self.sizes)
        placed = placed[np.argsort(self.starts[placed])]
        stops = np.append(self.starts[placed[1:]], self.total)
        self.reach[:] = 0
        self.reach[placed] = stops - self.starts[placed]
