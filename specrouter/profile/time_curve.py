"""T(n): how long a forward over n packed tokens takes, as learned while forwards run.

Contract: `TimeCurve` is what decisions read. `TimeEstimator` learns one model's curve, as of a
quiet machine; what stays with one model or one size moves that curve within some hundred forwards,
where other models or sizes are in use to compare with.
Not here: how slow the machine is just now (`machine_speed`).

Pure: no clock, no tensors. Not thread-safe: the owner locks.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FORMAT = 1  # of `TimeEstimator.to_json`
_PAIRS = 1e-6  # slopes are per million pairs of query and slot

_COLD_CALLS = 2  # of a model, whose times say more about loading than about the model
_TRIED = 3  # times of a bucket before one is averaged; until then the least counts
_YOUNG = 10  # times of a bucket until which a time may count for all it says
_PROFILED = 5.0  # times that a profiled one stands for: served forwards soon outweigh it
_REBUILD = 16  # forwards after which a curve is built anew
_WEIGHT = 0.05  # of a new time
_STEP = 0.2  # of a logarithm; what lies farther off counts as this far
_FAR = 0.5  # the same, for attention's slope
_OUTLIER = math.log(3.0)  # the same, for a young bucket
_FRESH, _OLD = 20, 100  # forwards since a bucket's last: its own word counts, its neighbours' does
_MOST_EVIDENCE = 25.0
_FIRST = 1.25  # times what a size may take by its neighbours: so much its first time may say
_UNTRIED = 500  # forwards after which a bucket that few were of is forgotten

_FADE = 0.995  # of what the attention's slope was learned from
_SLOPE_SPREAD = 1e-5  # what a slope may be, a priori: per pair, as a share of the least forward
_LEAST_NOISE = 0.02  # of a time, as a share
_LEAST_BASE = 0.1  # share of a time that is never attention


@dataclass(frozen=True)
class TimeCurve:
    """T(n, a) = base(n) + slope * a; neither more tokens nor more attention take less time.

    `points`: (tokens, ms), tokens rising and ms not falling, at least one. The base is linear
    between them, constant below the first, and goes on beyond the last as between the last two.
    `attended`, a: pairs of query and slot that attention computes, padding included, summed over
    the groups of rows: rows * queries * slots.
    """

    points: tuple[tuple[float, float], ...]
    slope_ms_per_million: float = 0.0
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
        """Milliseconds of a forward over `tokens`."""
        place = bisect_right(self._tokens, tokens) - 1
        if place < 0:
            base = self._ms[0]
        else:
            base = self._ms[place] + self._slopes[place] * (tokens - self._tokens[place])
            base = min(base, self._ms[place + 1])
        return base + self.slope_ms_per_million * _PAIRS * attended

    def many(self, tokens: NDArray[Any], attended: NDArray[Any] | float = 0.0) -> Floats:
        """`at`, for arrays of one shape; milliseconds in that shape."""
        known, ms, slopes = self._arrays
        place = np.maximum(np.searchsorted(known, tokens, side="right") - 1, 0)
        base = ms[place] + slopes[place] * np.maximum(tokens - known[place], 0.0)
        base = np.minimum(base, ms[place + 1])
        total: Floats = base + self.slope_ms_per_million * _PAIRS * attended
        return total

    @cached_property
    def _arrays(self) -> tuple[Floats, Floats, Floats]:
        return np.array(self._tokens), np.array(self._ms), np.array(self._slopes)

    def scaled(self, factor: float) -> "TimeCurve":
        """The curve of something that takes `factor` times as long."""
        points = tuple((tokens, ms * factor) for tokens, ms in self.points)
        return TimeCurve(points, self.slope_ms_per_million * factor)


@dataclass(frozen=True)
class TimeSample:
    """A forward over `tokens` that attended to `attended` pairs took `ms`."""

    tokens: int
    attended: float
    ms: float


@cache
def bucket_of(tokens: int) -> int:
    """The nearest, in proportion, of the sizes 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    power = 1 << (max(1, tokens).bit_length() - 1)
    sizes = (power, power * 3 // 2, power * 2)  # 1 * 3 // 2 is 1 again
    return min(sizes, key=lambda size: abs(math.log(size / max(1, tokens))))


@dataclass
class _Bucket:
    log_ms: float  # of a forward over the bucket's size that attends to `attended`
    attended: float
    visits: float
    last: int  # the model's forward that was here last
    seen: dict[int, tuple[float, float]]  # then, of the other buckets: log_ms and visits


@dataclass
class _Slope:
    """Milliseconds per pair, by ridge regression within buckets, in shares of their times.

    Old evidence fades. Without much of it, or where attention hardly varied, the prior stands.
    """

    prior: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0
    _errors: float = 0.0
    _count: float = 0.0

    def add(self, x: float, y: float, error: float) -> None:
        """Pairs more than usual, time more than usual, and what the slope left unexplained."""
        self._xx = _FADE * self._xx + x * x
        self._xy = _FADE * self._xy + x * y
        self._errors = _FADE * self._errors + error * error
        self._count = _FADE * self._count + 1.0

    def estimate(self, spread: float) -> float:
        """At least 0. `spread`: how far from the prior it may well be."""
        if self._xx == 0.0:
            return self.prior
        noise = max(self._errors / self._count, _LEAST_NOISE**2)
        evidence, doubt = self._xx / noise, 1.0 / spread**2
        return max(0.0, (self._xy / noise + self.prior * doubt) / (evidence + doubt))


class TimeEstimator:
    """One model's curve, from its forwards on a quiet machine.

    A moving average of log T per bucket of n, from which an isotonic regression makes the curve.
    Only a bucket's own forwards move it, as long as it has any; afterwards it follows the
    neighbours that do: by the factor that they changed since.

    A size's first forwards may take far longer than any later one (kernels are compiled), and what
    looks slow is not asked for again: so they are bounded, and alone they do not count for ever.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._slope = _Slope()
        self._forwards = 0
        self._curve: TimeCurve | None = None
        self._news = 0  # forwards that the curve does not know of

    @classmethod
    def profiled(cls, samples: Iterable[TimeSample]) -> "TimeEstimator":
        """From undisturbed times; those of one size at two contexts tell attention's slope."""
        times, samples = cls(), sorted(samples, key=lambda sample: sample.tokens, reverse=True)
        times._slope.prior = slope = _profiled_slope(samples)
        most = math.inf  # noise only slows: no size takes longer than a larger one
        for sample in samples:
            size = bucket_of(sample.tokens)
            known = times._buckets.get(size)
            if known is None or sample.attended < known.attended:
                most = min(most, max(sample.ms - slope * sample.attended, _LEAST_BASE * sample.ms))
                times._put(size, most + slope * sample.attended, sample.attended, _PROFILED)
        times._forwards = _COLD_CALLS
        times._meet()
        return times

    @property
    def is_cold(self) -> bool:
        """The model's next forward will not count."""
        return self._forwards < _COLD_CALLS

    def knows(self, tokens: int) -> bool:
        """Forwards of about this size were seen before, so that the curve is no guess."""
        size = bucket_of(tokens)
        tried = [n for n, bucket in self._buckets.items() if bucket.visits >= _TRIED]
        below = any(size / 2 <= n <= size for n in tried)
        return below and any(size <= n <= size * 2 for n in tried)

    def record(self, tokens: int, attended: float, elapsed_ms: float) -> None:
        """Learns from a forward. A time that is no positive number is ignored."""
        self._forwards += 1
        if self._forwards <= _COLD_CALLS or not 0.0 < elapsed_ms < math.inf:
            return
        curve, size = self.curve(), bucket_of(tokens)
        bucket = self._buckets.get(size)
        if curve is not None:  # as if the forward had been of the bucket's size
            pairs = attended if bucket is None else bucket.attended
            usual = curve.at(tokens, attended)
            elapsed_ms *= curve.at(size, pairs) / usual
        if bucket is None:
            if curve is not None:
                elapsed_ms = min(elapsed_ms, _FIRST * _most_ms(curve, size, attended))
            self._put(size, elapsed_ms, attended, 1.0)
            self._introduce(size, curve)
        else:
            slope = curve.slope_ms_per_million * _PAIRS if curve is not None else 0.0
            self._learn(size, bucket, attended, math.log(elapsed_ms), slope)
            self._news += 1
            if bucket.visits > _YOUNG and self._news < _REBUILD:
                return
        self._curve = None

    def curve(self) -> TimeCurve | None:
        """None before the first forward that counts.

        Built anew after some forwards only: each moves it by a percent at most, and building it
        takes as long as a small model's forward.
        """
        if self._curve is None and self._buckets:
            self._forget_untried()
            self._curve, self._news = self._build(), 0
        return self._curve

    def to_json(self) -> dict[str, Any]:
        buckets = [
            [size, math.exp(self._current(size)), bucket.attended, bucket.visits]
            for size, bucket in sorted(self._buckets.items())
        ]
        return {"format": FORMAT, "slope_ms_per_million": self._pairs_ms() / _PAIRS, "of": buckets}

    @classmethod
    def from_json(cls, data: Any) -> "TimeEstimator":
        """Of a model that is cold again. Raises `ValueError` for what `to_json` did not write."""
        times = cls()
        try:
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']!r}, not {FORMAT}")
            times._slope.prior = _positive(data["slope_ms_per_million"], least=0.0) * _PAIRS
            for size, ms, attended, visits in data["of"]:
                if not isinstance(size, int) or size != bucket_of(size):
                    raise ValueError(f"no size of a bucket: {size!r}")
                pairs, visits = _positive(attended, least=0.0), _positive(visits)
                times._put(size, _positive(ms), pairs, min(visits, _PROFILED))
        except (KeyError, TypeError) as error:
            raise ValueError(f"no times of a model: {error!r}") from error
        times._meet()
        return times

    def _put(self, size: int, ms: float, attended: float, visits: float) -> None:
        seen = self._others(size)
        self._buckets[size] = _Bucket(math.log(ms), attended, visits, self._forwards, seen)
        self._curve = None

    def _introduce(self, size: int, curve: TimeCurve | None) -> None:
        """Lets older buckets follow a new one, from where it was thought to be, or else is."""
        new = self._buckets[size]
        log_ms = new.log_ms
        if curve is not None and curve.points[0][0] < size < curve.points[-1][0]:
            log_ms = math.log(curve.at(size, new.attended))
        for other, bucket in self._buckets.items():
            if other != size:
                bucket.seen[size] = (log_ms, 0.0)

    def _forget_untried(self) -> None:
        for size, bucket in list(self._buckets.items()):
            is_old = self._forwards - bucket.last > _UNTRIED
            if is_old and bucket.visits < _TRIED and len(self._buckets) > 1:
                del self._buckets[size]
                for other in self._buckets.values():
                    other.seen.pop(size, None)

    def _meet(self) -> None:
        for size, bucket in self._buckets.items():
            bucket.last, bucket.seen = self._forwards, self._others(size)

    def _others(self, size: int) -> dict[int, tuple[float, float]]:
        return {n: (b.log_ms, b.visits) for n, b in self._buckets.items() if n != size}

    def _learn(
        self, size: int, bucket: _Bucket, attended: float, log_ms: float, slope: float
    ) -> None:
        bucket.log_ms = self._current(size)
        error = log_ms - bucket.log_ms
        bucket.visits += 1.0
        bucket.last = self._forwards
        if bucket.visits <= _TRIED:
            bucket.log_ms += min(error, 0.0)
        else:
            self._learn_slope(bucket, attended, error, slope)
            most = _OUTLIER if bucket.visits <= _YOUNG else _STEP
            weight = max(_WEIGHT, 1.0 / bucket.visits)
            bucket.log_ms += weight * min(max(error, -most), most)
        bucket.seen = self._others(size)

    def _learn_slope(self, bucket: _Bucket, attended: float, error: float, slope: float) -> None:
        own = math.exp(bucket.log_ms)
        more = attended - bucket.attended
        error = math.expm1(min(max(error, -_FAR), _FAR))
        self._slope.add(more / own, error + slope * more / own, error)
        bucket.attended += _WEIGHT * more  # and the time that the mean forward then takes
        bucket.log_ms = math.log(max(own + slope * _WEIGHT * more, _LEAST_BASE * own))

    def _current(self, size: int) -> float:
        """log ms of a bucket: as it was, moved as its neighbours moved since, if it is old."""
        bucket = self._buckets[size]
        age = self._forwards - bucket.last
        if age <= _FRESH or not bucket.seen:
            return bucket.log_ms
        moved = weights = 0.0
        for other, (log_ms, visits) in bucket.seen.items():
            known = self._buckets[other]
            news = known.visits - visits
            near = min(size, other) / max(size, other)
            weight = news / (news + _FRESH) * near
            moved += weight * (known.log_ms - log_ms)
            weights += weight
        if weights == 0.0:
            return bucket.log_ms
        return bucket.log_ms + moved / weights * min(1.0, (age - _FRESH) / (_OLD - _FRESH))

    def _pairs_ms(self) -> float:
        """ms per pair, and never so many that a known forward would be all attention."""
        if not self._buckets:
            return self._slope.prior
        known = [(math.exp(bucket.log_ms), bucket.attended) for bucket in self._buckets.values()]
        slope = self._slope.estimate(_SLOPE_SPREAD * min(ms for ms, _ in known))
        most = ((1.0 - _LEAST_BASE) * ms / attended for ms, attended in known if attended > 0)
        return min(slope, *most, math.inf)

    def _build(self) -> TimeCurve:
        slope = self._pairs_ms()
        sizes = sorted(self._buckets)
        base, weights = [], []
        for size in sizes:
            bucket = self._buckets[size]
            ms = math.exp(self._current(size))
            base.append(max(ms - slope * bucket.attended, _LEAST_BASE * ms))
            age = self._forwards - bucket.last
            weights.append(min(bucket.visits, _MOST_EVIDENCE) / (1.0 + age / _OLD))
        points = tuple(zip(map(float, sizes), isotonic(base, weights), strict=True))
        return TimeCurve(points, slope / _PAIRS)


def _most_ms(curve: TimeCurve, tokens: int, attended: float) -> float:
    """Of a forward of a size that was not seen: in proportion to its tokens as long as the next
    smaller one that was, and no longer than the next larger one."""
    place = bisect_right(curve.points, (tokens, math.inf)) - 1
    size, ms = curve.points[max(place, 0)]
    most = ms * max(1.0, tokens / size)
    if place + 1 < len(curve.points):
        most = min(most, curve.points[place + 1][1])
    return most + curve.slope_ms_per_million * _PAIRS * attended


def _positive(value: Any, least: float = 1e-9) -> float:
    if not least <= value < math.inf:
        raise ValueError(f"out of range: {value!r}")
    return float(value)


def _profiled_slope(samples: Iterable[TimeSample]) -> float:
    """ms per pair, by least squares within the sizes that were timed at several contexts."""
    sizes: dict[int, list[TimeSample]] = {}
    for sample in samples:
        sizes.setdefault(sample.tokens, []).append(sample)
    xx = xy = 0.0
    for group in sizes.values():
        pairs = math.fsum(sample.attended for sample in group) / len(group)
        ms = math.fsum(sample.ms for sample in group) / len(group)
        xx += math.fsum((sample.attended - pairs) ** 2 for sample in group)
        xy += math.fsum((sample.attended - pairs) * (sample.ms - ms) for sample in group)
    return max(0.0, xy / xx) if xx > 0.0 else 0.0


def isotonic(values: list[float], weights: list[float]) -> list[float]:
    """The nearest sequence that does not fall, by weighted squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        length = 1
        while pools and pools[-1][0] > value:
            other, others, count = pools.pop()
            value = (value * weight + other * others) / (weight + others)
            weight, length = weight + others, length + count
        pools.append((value, weight, length))
    return [value for value, _, length in pools for _ in range(length)]
