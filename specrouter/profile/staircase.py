"""Staircase: T(n) where passes are filled up to fixed sizes, as CUDA graphs are.

Contract: a pass over n tokens takes the time of the smallest size that holds n. So more tokens up
to that size cost nothing, and budgets end there. Beyond the largest size passes are not filled up.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrouter.profile.time_curve import Floats, TimeCurve


@dataclass(frozen=True)
class Staircase:
    """`ForwardTimes` by `sizes`, ascending and at least one, and the `curve` of their times."""

    curve: TimeCurve
    sizes: tuple[int, ...]

    @property
    def slope_ms_per_million(self) -> float:
        """See `TimeCurve`."""
        return self.curve.slope_ms_per_million

    def at(self, tokens: float, attended: float = 0.0) -> float:
        return self.curve.at(filled_size(tokens, self.sizes), attended)

    def many(self, tokens: NDArray[Any], attended: NDArray[Any] | float = 0.0) -> Floats:
        return self.curve.many(self.filled(tokens), attended)

    def filled(self, tokens: NDArray[Any]) -> NDArray[Any]:
        sizes = np.array(self.sizes)
        place = np.searchsorted(sizes, tokens)
        largest: NDArray[Any] = np.where(
            place < len(sizes), sizes[np.minimum(place, len(sizes) - 1)], tokens
        )
        return largest

    def tokens_within(self, ms: float, attended: float = 0.0, slots: float = 0.0) -> float:
        largest = self.sizes[-1]

        def ms_of(tokens: int) -> float:
            return self.at(tokens, attended + slots * tokens)

        if ms_of(largest) > ms:
            return float(bisect_right(range(1, largest), ms, key=ms_of))
        return max(float(largest), self.curve.tokens_within(ms, attended, slots))

    def scaled(self, factor: float) -> "Staircase":
        return Staircase(self.curve.scaled(factor), self.sizes)


def filled_size(tokens: float, sizes: tuple[int, ...]) -> float:
    """Return the smallest size that holds so many tokens, or their number if none does."""
    place = bisect_left(sizes, tokens)
    return float(sizes[place]) if place < len(sizes) else tokens
