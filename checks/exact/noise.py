"""The noise is Gumbel, and knows no structure across seeds, positions and tokens.

Contract: pure functions of the noise function; the engine is not involved. Neighbours in every
direction are compared, the diagonals too: noise keyed by seed + position would repeat there.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from processors.noise import gumbel
from test_support.chi_square import Floats, correlation_p_value, uniform_p_value

# (seed, position, token) steps from one value to the one that it must not resemble.
STEPS = ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, -1, 0), (1, 0, 1), (1, 0, -1), (0, 1, -1))
# Where runs of consecutive seeds begin: the middle one crosses the edge of 32 bits.
FIRST_SEEDS = (0, 2**32 - 500, 2**62)
_POSITIONS = 3
_TOKENS = 16


def noise_p_values(seeds: int) -> dict[str, float]:
    """A p-value per test, over `seeds` seeds; a repeated value gives 0."""
    blocks = [_uniforms(first, seeds // len(FIRST_SEEDS) + 1) for first in FIRST_SEEDS]
    p_values = {"uniform": uniform_p_value(np.concatenate([block.ravel() for block in blocks]))}
    for step in STEPS:
        pairs = [_neighbours(block, step) for block in blocks]
        here, there = (np.concatenate(side) for side in zip(*pairs, strict=True))
        p_values[f"step {step}"] = correlation_p_value(here, there)
        # Values may be tied together without being correlated.
        p_values[f"spread {step}"] = correlation_p_value((here - 0.5) ** 2, (there - 0.5) ** 2)
    p_values["distinct"] = float(_all_distinct(blocks))
    return p_values


def _uniforms(first_seed: int, count: int) -> Floats:
    """[count, positions, tokens], uniform on (0, 1) if the noise is Gumbel."""
    values = [
        [gumbel(first_seed + offset, position, _TOKENS) for position in range(_POSITIONS)]
        for offset in range(count)
    ]
    uniforms: NDArray[np.float64] = np.exp(-np.exp(-np.asarray(values, dtype=np.float64)))
    return uniforms


def _neighbours(block: Floats, step: Sequence[int]) -> tuple[Floats, Floats]:
    here, there = list[slice](), list[slice]()
    for distance, size in zip(step, block.shape, strict=True):
        here.append(slice(max(0, -distance), size - max(0, distance)))
        there.append(slice(max(0, distance), size - max(0, -distance)))
    return block[tuple(here)].ravel(), block[tuple(there)].ravel()


def _all_distinct(blocks: Sequence[Floats]) -> bool:
    values = np.concatenate([block.ravel() for block in blocks])
    return len(np.unique(values)) == len(values)
