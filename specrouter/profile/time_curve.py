"""TimeCurve: T(n), the time of a pass over n packed tokens, as decisions use it.

Not here: how a curve is learned (`time_regression`), and how slow the machine is (`perf_model`).
"""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

PAIRS = 1e-6  # slopes are per million pairs of query and slot


@dataclass(frozen=True)
class TimeCurve:
    """T(n, a) = base(n) + slope * a; more tokens or more attention never take less time.

    `points`: (tokens, ms), tokens ascending and ms not falling, at least one. The base is linear
    between them, constant below the first, and extrapolated beyond the last from the last two.
    `attended`, a: pairs of query and slot that attention computes, padding included, summed over
    the groups of rows: rows * queries * slots.
    `sizes`: ascending; passes are filled up to the next of them, as CUDA graphs are, so that more
    tokens up to it cost nothing. Beyond the largest, and if there are none, nothing is filled up.
    """

    points: tuple[tuple[float, float], ...]
    slope_ms_per_million: float = 0.0
    sizes: tuple[int, ...] = ()
    _tokens: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _ms: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _slopes: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tokens, ms = zip(*self.points, strict=True)
        steps = list(zip(self.points, self.points[1:], strict=False))
        assert all(a[0] < b[0] and a[1] <= b[1] for a, b in steps), "points do not rise"
        assert self.slope_ms_per_million >= 0.0, "attention takes no negative time"
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in steps]
        object.__setattr__(self, "_tokens", tokens)
        object.__setattr__(self, "_ms", (*ms, math.inf))  # no segment rises above its end
        object.__setattr__(self, "_slopes", (*slopes, slopes[-1] if slopes else 0.0))

    def at(self, tokens: float, attended: float = 0.0) -> float:
        """Return the milliseconds of a pass over `tokens`."""
        tokens = filled_size(tokens, self.sizes)
        place = bisect_right(self._tokens, tokens) - 1
        if place < 0:
            base = self._ms[0]
        else:
            base = self._ms[place] + self._slopes[place] * (tokens - self._tokens[place])
            base = min(base, self._ms[place + 1])
        return base + self.slope_ms_per_million * PAIRS * attended

    def tokens_within(self, ms: float, attended: float = 0.0, slots: float = 0.0) -> float:
        """Return the most tokens, a whole number, whose pass takes at most `ms`.

        Infinite if the curve never rises so far, 0 if no pass is so fast. `attended` pairs do not
        depend on the number of tokens; each token adds `slots` more.
        """
        if not self.sizes:
            return self._unfilled_within(ms, attended, slots)
        largest = self.sizes[-1]

        def ms_of(tokens: int) -> float:
            return self.at(tokens, attended + slots * tokens)

        if ms_of(largest) > ms:
            return float(bisect_right(range(1, largest), ms, key=ms_of))
        return max(float(largest), self._unfilled_within(ms, attended, slots))

    def _unfilled_within(self, ms: float, attended: float, slots: float) -> float:
        """Return the same for passes that are not filled up."""
        each = self.slope_ms_per_million * PAIRS * slots
        left_ms = ms - self.slope_ms_per_million * PAIRS * attended
        starts = [base + each * n for n, base in zip(self._tokens, self._ms, strict=False)]
        place = bisect_right(starts, left_ms) - 1
        if place >= 0:
            first, start_ms, rise = self._tokens[place], starts[place], self._slopes[place] + each
        else:  # below the first point only attention grows
            first, start_ms, rise = 0.0, self._ms[0], each
        if start_ms > left_ms:
            return 0.0
        most = first + (left_ms - start_ms) / rise if rise > 0.0 else math.inf
        if math.isinf(most):
            return math.inf
        tokens = math.floor(most)
        # Correct rounding errors of one token.
        plain = replace(self, sizes=()) if self.sizes else self
        fits = plain.at(tokens + 1) + each * (tokens + 1) <= left_ms
        over = plain.at(tokens) + each * tokens > left_ms
        return float(max(0, tokens + fits - over))

    def many(self, tokens: NDArray[Any], attended: NDArray[Any] | float = 0.0) -> Floats:
        """Return `at` for arrays of one shape, in milliseconds."""
        known, ms, slopes = self._arrays
        tokens = self.filled(tokens)
        place = np.maximum(np.searchsorted(known, tokens, side="right") - 1, 0)
        base = ms[place] + slopes[place] * np.maximum(tokens - known[place], 0.0)
        base = np.minimum(base, ms[place + 1])
        total: Floats = base + self.slope_ms_per_million * PAIRS * attended
        return total

    def filled(self, tokens: NDArray[Any]) -> NDArray[Any]:
        """Return the sizes that passes over so many tokens are filled up to, at no extra time."""
        if not self.sizes:
            return tokens
        sizes = np.array(self.sizes)
        place = np.searchsorted(sizes, tokens)
        largest: NDArray[Any] = np.where(
            place < len(sizes), sizes[np.minimum(place, len(sizes) - 1)], tokens
        )
        return largest

    @cached_property
    def _arrays(self) -> tuple[Floats, Floats, Floats]:
        return np.array(self._tokens), np.array(self._ms), np.array(self._slopes)

    def scaled(self, factor: float) -> "TimeCurve":
        """Return the curve with `factor` times the time."""
        points = tuple((tokens, ms * factor) for tokens, ms in self.points)
        return TimeCurve(points, self.slope_ms_per_million * factor, self.sizes)


def filled_size(tokens: float, sizes: tuple[int, ...]) -> float:
    """Return the smallest size that holds so many tokens, or their number if none does."""
    place = bisect_left(sizes, tokens)
    return float(sizes[place]) if place < len(sizes) else tokens
