"""PerformanceProfiler: what the scheduler knows, learned from the cycles as they run.

Times are kept per model and size of the pack, because a forward over 8 tokens costs about as much
as one over 1; similarities and acceptances per pair of models. All are moving averages.
Source: SpecRouter, sections 4.2 and 4.6, Equations 5 and 6.
"""

import math
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

Pair = tuple[str, str]  # who proposed, who verified
Trial = tuple[str, str, int]  # a pair, and how wide the trees were

_TIME_WEIGHT = 0.15  # of a new time; a faster one counts more, since noise only slows
_FASTER_WEIGHT = 0.4
_COLD_CALLS = 2  # of a model, whose times say more about loading than about the model
_TRIED = 3  # times of a bucket before one is averaged; until then the least counts
_STALE_CYCLES = 512  # after which a model that nobody used is to be tried again
_OUTLIER = 3.0  # a time is taken for at most so many times the known one
_SIMILARITY_WEIGHT = 0.05
_EVIDENCE = 400.0  # tokens after which older acceptances have faded


@dataclass(frozen=True)
class TimeCurve:
    """T(n): `points` are (tokens, ms), both rising."""

    points: tuple[tuple[int, float], ...]

    def at(self, tokens: float) -> float:
        """Milliseconds of a forward over `tokens`; linear between points, in proportion beyond."""
        (first, first_ms), (last, last_ms) = self.points[0], self.points[-1]
        if tokens <= first:
            return first_ms
        if tokens >= last:
            return last_ms * (tokens / last) if last > 16 else last_ms
        for (left, left_ms), (right, right_ms) in zip(self.points, self.points[1:], strict=False):
            if tokens <= right:
                share = (tokens - left) / (right - left)
                return left_ms + share * (right_ms - left_ms)
        raise AssertionError("points are sorted")


@dataclass(frozen=True)
class Acceptance:
    """How often one of the proposed tokens was accepted where their parent was.

    `evidence`: how many times that was seen.
    """

    rate: float
    evidence: float


@dataclass(frozen=True)
class PerformanceSnapshot:
    """All that a scheduling decision may depend on, beside the configuration."""

    times: Mapping[str, TimeCurve]
    similarity: Mapping[Pair, float]
    acceptance: Mapping[Trial, Acceptance]
    parameters: Mapping[str, int]
    stale: frozenset[str] = frozenset()  # models that were used, but not lately


@dataclass
class _Time:
    ms: float
    samples: int


@dataclass
class _Counts:
    accepted: float = 0.0
    judged: float = 0.0


@dataclass
class PerformanceProfiler:
    """Thread-safe: the engine records, anybody takes snapshots."""

    parameters: Mapping[str, int]
    _cycle: int = 0
    _used: dict[str, int] = field(default_factory=dict)  # the cycle of each model's last time
    _times: dict[str, dict[int, _Time]] = field(default_factory=dict)
    _calls: Counter[str] = field(default_factory=Counter)
    _similarity: dict[Pair, float] = field(default_factory=dict)
    _acceptance: dict[Trial, _Counts] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def record_time(self, model: str, tokens: int, elapsed_ms: float) -> None:
        bucket = 1 << max(0, tokens - 1).bit_length()  # the next power of two
        with self._lock:
            self._calls[model] += 1
            self._used[model] = self._cycle
            if self._calls[model] <= _COLD_CALLS:
                return
            times = self._times.setdefault(model, {})
            known = times.setdefault(bucket, _Time(elapsed_ms, 0))
            known.samples += 1
            if known.samples <= _TRIED:
                known.ms = min(known.ms, elapsed_ms)
                return
            weight = _FASTER_WEIGHT if elapsed_ms < known.ms else _TIME_WEIGHT
            known.ms += weight * (min(elapsed_ms, _OUTLIER * known.ms) - known.ms)

    def begin_cycle(self) -> None:
        """Marks the passing of time, in cycles."""
        with self._lock:
            self._cycle += 1

    def record_similarity(self, pair: Pair, total_variation: float) -> None:
        if not math.isfinite(total_variation):  # an average would never forget it
            return
        with self._lock:
            score = 1.0 - total_variation
            known = self._similarity.get(pair, score)
            self._similarity[pair] = known + _SIMILARITY_WEIGHT * (score - known)

    def record_acceptance(self, pair: Pair, accepted: int, rejected: int, width: int = 1) -> None:
        """`rejected`: how often all proposals failed whose parent had been accepted."""
        with self._lock:
            counts = self._acceptance.setdefault((*pair, width), _Counts())
            judged = accepted + rejected
            fade = max(0.0, 1.0 - judged / _EVIDENCE)
            counts.accepted = counts.accepted * fade + accepted
            counts.judged = counts.judged * fade + judged

    def snapshot(self) -> PerformanceSnapshot:
        with self._lock:
            times = {name: _curve(times) for name, times in self._times.items()}
            acceptance = {
                trial: Acceptance(counts.accepted / counts.judged, counts.judged)
                for trial, counts in self._acceptance.items()
                if counts.judged > 0
            }
            similarity = dict(self._similarity)
            oldest = self._cycle - _STALE_CYCLES
            stale = frozenset(name for name, used in self._used.items() if used < oldest)
        return PerformanceSnapshot(
            MappingProxyType(times),
            MappingProxyType(similarity),
            MappingProxyType(acceptance),
            self.parameters,
            stale,
        )


def _curve(times: Mapping[int, _Time]) -> TimeCurve:
    """Fewer tokens never take more time: what says otherwise is noise, which only slows."""
    points: list[tuple[int, float]] = []
    for tokens in sorted(times, reverse=True):
        ceiling = points[-1][1] if points else times[tokens].ms
        points.append((tokens, min(times[tokens].ms, ceiling)))
    return TimeCurve(tuple(reversed(points)))
