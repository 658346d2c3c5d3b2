"""SimulatedRows: what stands in the rows of a simulated engine, as counts of tokens."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specrouter.cycle import CATCH_UP_TOKENS, CONTEXT_STEP

Ints = NDArray[np.int64]


@dataclass(eq=False)
class SimulatedRows:
    """Rows of requests that run. `read`: committed tokens that each model holds keys and values of.

    Attributes:
        follow: models that lack no more than what a draft leaves unread, whatever they have read.
        committed: [rows] tokens of each text, prompt included.
        ends: [rows] that it will have at most.
        expected: [rows] tokens whose memory a row has from its beginning.
    """

    count: int
    models: Sequence[str]
    follow: frozenset[str] = frozenset()
    committed: Ints = field(init=False)
    ends: Ints = field(init=False)
    read: dict[str, Ints] = field(init=False)
    expected: Ints = field(init=False)
    _free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.committed = np.zeros(self.count, dtype=np.int64)
        self.ends = np.zeros(self.count, dtype=np.int64)
        self.expected = np.zeros(self.count, dtype=np.int64)
        self.read = {name: np.zeros(self.count, dtype=np.int64) for name in self.models}
        self._free = list(range(self.count))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def held(self) -> Ints:
        """[rows] tokens of memory."""
        return np.maximum(self.committed, self.expected)

    def open(self, committed: int, end: int, expected: int = 0) -> int:
        """The lowest free row, for a text of which no model has read anything."""
        row = heapq.heappop(self._free)
        self.committed[row], self.ends[row], self.expected[row] = committed, end, expected
        for each in self.read.values():
            each[row] = 0
        return row

    def close(self, row: int) -> None:
        self.committed[row] = self.expected[row] = 0
        heapq.heappush(self._free, row)

    def lag(self, name: str, rows: Ints) -> Ints:
        """[R] committed tokens that a model has not read, the last one not counted."""
        lag: Ints = self.committed[rows] - 1 - self.read[name][rows]
        return np.minimum(lag, 1) if name in self.follow else lag

    def remaining(self, rows: Ints) -> Ints:
        """[R] tokens that the texts may still gain."""
        return self.ends[rows] - self.committed[rows]

    def slots_of(self, rows: Ints) -> Ints:
        """[R] keys that a query of each row reads, in whole steps."""
        padded: Ints = -(-(self.committed[rows] + CATCH_UP_TOKENS) // CONTEXT_STEP) * CONTEXT_STEP
        return padded

    def slots_for(self, tokens: int) -> int:
        """Of a row with so many tokens."""
        return -(-(tokens + CATCH_UP_TOKENS) // CONTEXT_STEP) * CONTEXT_STEP
