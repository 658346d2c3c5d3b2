"""TimeRegression: one model's times, from the load-time profile and the passes that it serves.

    T(n, a) = base(n) + slope * a

The base at the sizes of a fixed grid (knots, linear in between) and the slope are the state of a
Kalman filter: a recursive least-squares regression that forgets. A pass moves the knots around its
size, the slope, and, by their prior correlation, neighbouring knots that are not visited.
Forgetting lets the uncertainty grow back to the prior's, so that a lasting change is followed. The
curve consists of the knots that a profile or a pass has observed.

Robust: an observation counts at most as two standard deviations, and as one where it is slower than
expected, so a single outlier moves a well-known time by a percent. The first passes of a size,
during which kernels are compiled, count only if they are faster than expected, and a model without
observations starts with the fastest pass of a size: otherwise a size that once looked slow would
never be tried again.

Pure: no clock, no tensors. Not thread-safe: the owner locks.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from specrouter.profile.time_curve import PAIRS, Floats, TimeCurve

FORMAT = 2  # of `TimeRegression.to_json`
# Tokens of the knots: 1, 2, 3, 4, 6, 8, 12, ... 4096.
_SIZES = np.sort(np.append(2 ** np.arange(13), 3 * 2 ** np.arange(11)))

_NOISE = 0.1  # standard deviation of a time, as a share of it; for a profiled one, of the prior's
_SPREAD = 0.5  # the same, for a knot without observations,
_SLOPE_SPREAD = 5.0  # and for the slope, as a multiple of the fastest pass
_FORGETTING = 2e-4  # share of that variance that comes back with every pass
_OCTAVE = 0.9  # correlation of two knots, one twice the size of the other
_CLIP = 2.0  # bound of an observation, in standard deviations
_COLD = 2  # number of first passes of a size that may include compilation
_LEAST = 0.1  # least share of a time after an update, and of a profiled one without attention


@dataclass(frozen=True)
class TimeSample:
    """A pass over `tokens` that attended to `attended` pairs took `ms`."""

    tokens: int
    attended: float
    ms: float


@cache
def bucket_of(tokens: int) -> int:
    """Return the nearest, in proportion, of the sizes 1, 2, 3, 4, 6, 8, 12, 16, 24, ..., 4096."""
    return int(_SIZES[np.argmin(np.abs(np.log(_SIZES / max(1, tokens))))])


class TimeRegression:
    """The times of one model; the last entry of the state is the slope, in ms per million pairs."""

    _state: Floats  # [K + 1]
    _cov: Floats
    _prior: Floats  # covariance of a model without observations

    def __init__(self) -> None:
        self._is_known = np.zeros(len(_SIZES), dtype=np.bool_)
        self._state = self._cov = self._prior = np.zeros(0)
        self._seen: Counter[int] = Counter()  # passes, by bucket
        self._fastest: dict[int, float] = {}  # of each bucket, before the first pass that counts
        self._curve: TimeCurve | None = None

    @classmethod
    def profiled(cls, samples: Iterable[TimeSample]) -> "TimeRegression":
        """Return the regression from undisturbed times.

        The attention's slope comes from times of one size at two contexts.
        """
        samples = sorted(samples, key=lambda sample: (-sample.tokens, sample.attended))
        slope = _profiled_slope(samples)
        base: dict[int, float] = {}
        most = math.inf  # noise only slows: no size takes longer than a larger one
        for sample in samples:
            if bucket_of(sample.tokens) not in base:
                own = max(sample.ms - slope * PAIRS * sample.attended, _LEAST * sample.ms)
                base[bucket_of(sample.tokens)] = most = min(most, own)
        return cls._of(sorted(base.items()), slope)

    @classmethod
    def _of(cls, points: Iterable[tuple[float, float]], slope: float) -> "TimeRegression":
        """Return the regression from a curve; knots between its sizes are less certain."""
        found, known = cls(), tuple(points)
        if known:
            curve = TimeCurve(known, slope)
            found._begin(curve.many(_SIZES), slope)
            known_at = found._is_known = np.isin(_SIZES, [size for size, _ in known])
            among, prior = found._prior[:-1, :-1][np.ix_(known_at, known_at)], found._prior
            across = prior[:-1, :-1][:, known_at]
            found._cov = _NOISE**2 * prior
            found._cov[:-1, :-1] += prior[:-1, :-1] - across @ np.linalg.solve(among, across.T)
        return found

    def _begin(self, base: Floats, slope: float) -> None:
        """Start from these times, with the prior's uncertainty."""
        self._state, ms = np.append(base, slope), base
        octaves = np.log2(_SIZES)
        alike = _OCTAVE ** np.abs(octaves[:, None] - octaves)
        self._prior = np.zeros((len(self._state), len(self._state)))
        self._prior[:-1, :-1] = _SPREAD**2 * np.outer(ms, ms) * alike
        self._prior[-1, -1] = (_SLOPE_SPREAD * ms.min()) ** 2
        self._cov = self._prior.copy()

    def expected_ms(self, tokens: float, attended: float) -> float | None:
        """Return the expected time of a pass; None before the first one that counts."""
        return self._expected_ms(_row(tokens, attended)) if self._is_known.any() else None

    def _expected_ms(self, row: Floats) -> float:
        return max(float(row @ self._state), _LEAST * float(self._state[0]))

    def knows(self, tokens: int) -> bool:
        """Return whether passes of this size are known, from before or from a profile.

        Then a slow one is attributed to the machine, and not to the curve.
        """
        if not self._is_known.any() or 0 < self._seen[bucket_of(tokens)] < _COLD:
            return False
        row = _row(tokens, 0.0)
        return math.sqrt(row @ self._cov @ row) <= _CLIP * _NOISE * float(row @ self._state)

    def record(self, tokens: int, attended: float, ms: float) -> None:
        """Learn from a pass. A time that is not positive and finite is ignored.

        Raises:
            ArithmeticError: the result would not be finite; nothing is learned.
        """
        if not 0.0 < ms < math.inf:
            return
        before = self._is_known.copy(), self._state, self._cov, self._prior
        try:
            self._learn(tokens, attended, ms)
            if not (np.isfinite(self._state).all() and np.isfinite(self._cov).all()):
                raise ArithmeticError(f"{ms} ms for {tokens} tokens teach no finite times")
        except Exception:
            self._is_known, self._state, self._cov, self._prior = before
            raise

    def _learn(self, tokens: int, attended: float, ms: float) -> None:
        size = bucket_of(tokens)
        self._seen[size] += 1
        is_cold = self._seen[size] <= _COLD
        if not self._is_known.any():
            ms = self._fastest[size] = min(ms, self._fastest.get(size, ms))
            if is_cold:
                return
            self._begin(np.full(len(_SIZES), ms), 0.0)
        elif is_cold and ms >= self._expected_ms(_row(tokens, attended)):
            return
        self._is_known[size == _SIZES] = True
        self._update(_row(tokens, attended), ms)
        self._curve = None

    def curve(self) -> TimeCurve | None:
        """Return the curve; None before the first pass that counts.

        Raises:
            ArithmeticError: the curve would not be finite.
        """
        if self._curve is None and self._is_known.any():
            known_at = np.flatnonzero(self._is_known)
            weights = 1.0 / np.diag(self._cov)[known_at]
            base = isotonic(self._state[known_at].tolist(), weights.tolist())
            if not all(map(math.isfinite, base)):
                raise ArithmeticError("the curve is not finite")
            points = tuple(zip(_SIZES[known_at].tolist(), base, strict=True))
            self._curve = TimeCurve(points, float(self._state[-1]))
        return self._curve

    def to_json(self) -> dict[str, Any]:
        curve = self.curve()
        points = [] if curve is None else [[size, ms] for size, ms in curve.points]
        slope = 0.0 if curve is None else curve.slope_ms_per_million
        return {"format": FORMAT, "slope_ms_per_million": slope, "of": points}

    @classmethod
    def from_json(cls, data: Any) -> "TimeRegression":
        """Return the regression as after a profile.

        Raises:
            ValueError: `to_json` did not write this.
        """
        try:
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']!r}, not {FORMAT}")
            slope = _positive(data["slope_ms_per_million"], least=0.0)
            points = [(_size(size), _positive(ms)) for size, ms in data["of"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"no times of a model: {error!r}") from error
        rises = all(a[0] < b[0] and a[1] <= b[1] for a, b in itertools.pairwise(points))
        if not rises:
            raise ValueError("times do not rise")
        return cls._of(points, slope)

    def scale(self, factor: float) -> None:
        """Multiply all learned times by a factor.

        Raises:
            ArithmeticError: it is not positive and finite; nothing changes.
        """
        if not 0.0 < factor < math.inf:
            raise ArithmeticError(f"times {factor}")
        if not self._is_known.any():
            return
        self._state, self._curve = self._state * factor, None
        self._prior, self._cov = self._prior * factor**2, self._cov * factor**2

    def _update(self, row: Floats, ms: float) -> None:
        expected, spread = self._expected_ms(row), self._cov @ row
        variance = float(row @ spread) + (_NOISE * expected) ** 2
        most = _CLIP * math.sqrt(variance)
        gain = spread / variance
        # Noise only adds time, so an observation slower than expected counts less.
        found = self._state + gain * min(max(ms - expected, -most), most / 2.0)
        self._state = np.maximum(found, _LEAST * self._state)
        self._cov = self._cov - gain[:, None] * spread
        self._cov += _FORGETTING * (self._prior - self._cov)


def _row(tokens: float, attended: float) -> Floats:
    """Return the weights [K + 1] of the state in a time: interpolated or extrapolated."""
    row = np.zeros(len(_SIZES) + 1)
    row[-1] = attended * PAIRS
    high = min(max(int(np.searchsorted(_SIZES, tokens)), 1), len(_SIZES) - 1)
    share = max(0.0, tokens - _SIZES[high - 1]) / (_SIZES[high] - _SIZES[high - 1])
    row[high - 1], row[high] = 1.0 - share, share
    return row


def _positive(value: Any, least: float = 1e-9) -> float:
    if not least <= value < math.inf:
        raise ValueError(f"out of range: {value!r}")
    return float(value)


def _size(value: Any) -> float:
    if not isinstance(value, int) or value != bucket_of(value):
        raise ValueError(f"no size of a knot: {value!r}")
    return float(value)


def _profiled_slope(samples: Iterable[TimeSample]) -> float:
    """Return ms per million pairs, by least squares within the sizes timed at several contexts."""
    sizes: dict[int, list[TimeSample]] = {}
    for sample in samples:
        sizes.setdefault(sample.tokens, []).append(sample)
    xx = xy = 0.0
    for group in sizes.values():
        pairs = np.array([sample.attended for sample in group]) * PAIRS
        times = np.array([sample.ms for sample in group])
        xx += float(((pairs - pairs.mean()) ** 2).sum())
        xy += float(((pairs - pairs.mean()) * (times - times.mean())).sum())
    return max(0.0, xy / xx) if xx > 0.0 else 0.0


def isotonic(values: list[float], weights: list[float]) -> list[float]:
    """Return the nearest sequence that does not fall, by weighted squares.

    Method: pool adjacent violators.
    """
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        length = 1
        while pools and pools[-1][0] > value:
            other, others, count = pools.pop()
            value = (value * weight + other * others) / (weight + others)
            weight, length = weight + others, length + count
        pools.append((value, weight, length))
    return [value for value, _, length in pools for _ in range(length)]
