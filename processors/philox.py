"""Philox 4x64-10 at any counters at once, whereas numpy's generator draws one after the other.

Contract: the words are those of `numpy.random.Philox` with the same keys and counters, to the bit.
A word costs some 15 times as much as one of numpy's, so this is for few of many.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_MULTIPLIERS = (np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157))
_WEYL = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B))
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_ROUNDS = 10


def philox(keys: Words, counters: Words) -> Words:
    """Return the words, [4, m], of m blocks.

    `keys` are [2, m], and `counters` [4, m] with the lowest word first.
    """
    key = [keys[0].copy(), keys[1].copy()]
    c0, c1, c2, c3 = counters
    for _ in range(_ROUNDS):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ key[0], low1, high0 ^ c3 ^ key[1], low0
        key[0] += _WEYL[0]
        key[1] += _WEYL[1]
    return np.stack((c0, c1, c2, c3))


def word_at(keys: Words, position: Any, index: NDArray[np.int64]) -> Words:
    """Return, [m], the word `index[i]` of numpy's stream for keys [2, m].

    Its counter is (0, position, 0, 0), which numpy increments before the first block.
    """
    counters = np.zeros((4, len(index)), dtype=np.uint64)
    counters[0] = index // 4 + 1
    counters[1] = position
    words: Words = np.take_along_axis(philox(keys, counters), index[None] % 4, axis=0)[0]
    return words


def _product(values: Words, factor: np.uint64) -> tuple[Words, Words]:
    """Return the high and low halves of the product, from four products of 32 bits each."""
    low, high = values & _LOW, values >> _HALF
    factor_low, factor_high = factor & _LOW, factor >> _HALF
    cross = high * factor_low + (low * factor_low >> _HALF)
    middle = low * factor_high + (cross & _LOW)
    return high * factor_high + (cross >> _HALF) + (middle >> _HALF), values * factor
