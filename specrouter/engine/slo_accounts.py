"""Counts of requests that attained their objectives, by class and in total.

Contract: every request is counted once, when it ends. Thread-safe. Times are arguments, in seconds
of one clock.
"""

import math
import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from specrouter.request.objective import BY_VALUE, NO_OBJECTIVE, Objective
from specrouter.request.output import RequestMetrics
from specrouter.request.running import RunningRequest

_RECENT = 1024  # requests whose times the percentiles describe


@dataclass(frozen=True)
class Percentiles:
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class SloCounts:
    """Counts of the ended requests of a class; see `SloFigures` for attributes not listed here.

    Attributes:
        attained_tokens: tokens of requests that attained their objectives.
        implied: requests with an implied TTFT that produced a first token.
        implied_kept: those of them whose first token came in that time.
    """

    requests: int = 0
    judged: int = 0
    attained: int = 0
    tokens: int = 0
    attained_tokens: int = 0
    implied: int = 0
    implied_kept: int = 0

    @property
    def missed(self) -> int:
        return self.judged - self.attained


@dataclass(frozen=True, kw_only=True)
class SloFigures:
    """Figures of the ended requests of a class, or of all.

    Attributes:
        requests: all of them, cancelled and failed ones included.
        judged: those with an objective.
        attained: those that attained it.
        attainment: attained / judged; None if none is judged.
        tokens: tokens that they produced.
        tokens_per_s: tokens / time.
        goodput_tokens_per_s: tokens of those that attained their objectives / time. The time is
            that of the whole report, from the first submission to the last end in all classes, so
            that goodputs of classes add up to the total's.
        ttft_ms, tpot_ms, e2e_ms: percentiles over those of the last 1024 ended requests that have
            one; None if none has. e2e: from submission to the last token.
    """

    requests: int
    judged: int
    attained: int
    attainment: float | None
    tokens: int
    tokens_per_s: float
    goodput_tokens_per_s: float
    ttft_ms: Percentiles | None
    tpot_ms: Percentiles | None
    e2e_ms: Percentiles | None


@dataclass(frozen=True)
class SloReport:
    """Figures of all requests and of each class.

    Attributes:
        duration_s: the time of `SloFigures.goodput_tokens_per_s`.
        classes: figures by the class's name in the configuration; "default": objectives given by
            value, "none": requests without one.
    """

    duration_s: float
    total: SloFigures
    classes: dict[str, SloFigures]


@dataclass(frozen=True)
class AdmissionCounts:
    """Counts of admission's decisions about the requests of a class.

    Attributes:
        admitted: requests with an objective, not declined, that were given their first row.
        best_effort: requests without one, or declined, that were given their first row.
        declined: requests whose objective was declined, the rejected ones included.
        rejected: those of them that ended with an error, because they asked for that.
        preempted: rows that were taken back.
    """

    admitted: int = 0
    best_effort: int = 0
    declined: int = 0
    rejected: int = 0
    preempted: int = 0


class SloAccounts:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._admissions: dict[str, Counter[str]] = {}
        self._stages: dict[str, list[list[int]]] = {}  # judged and attained, by class and stage

        self._total = _Account()
        self._classes: dict[str, _Account] = {}
        self._first_s, self._last_s = math.inf, -math.inf

    def record(
        self,
        metrics: RequestMetrics,
        tokens: int,
        submitted_s: float,
        ended_s: float,
        stages_before: int = 0,
    ) -> None:
        """Record a request that has ended.

        Args:
            metrics: its times and attainment.
            tokens: number of tokens that it produced, without those of an earlier attempt.
            submitted_s: time of its submission, by the one clock of all requests.
            ended_s: time of its end, by the same clock.
            stages_before: stages that had ended before its first token in this engine.
        """
        with self._lock:
            self._first_s = min(self._first_s, submitted_s)
            self._last_s = max(self._last_s, ended_s)
            own = self._classes.setdefault(class_of(metrics), _Account())
            for account in (own, self._total):
                account.add(metrics, tokens)
            stages = self._stages.setdefault(class_of(metrics), [])
            for place, is_attained in enumerate(metrics.attained_stages, stages_before):
                stages += [[0, 0] for _ in range(len(stages), place + 1)]
                stages[place][0] += 1
                stages[place][1] += is_attained

    def note_admission(
        self,
        came: Sequence[RunningRequest],
        declined: Sequence[RunningRequest],
        preempted: Sequence[RunningRequest],
    ) -> None:
        """Count a cycle's requests that were given a row, were declined, or lost their row."""
        with self._lock:
            for request in came:
                if request.preemptions:  # it was counted when it first came
                    continue
                is_free = request.objective is None or request.is_declined
                self._count(request, "best_effort" if is_free else "admitted")

            for request in declined:
                self._count(request, "declined")
                if request.finished:
                    self._count(request, "rejected")
            for request in preempted:
                self._count(request, "preempted")

    def _count(self, request: RunningRequest, what: str) -> None:
        name = class_named(request.objective)
        self._admissions.setdefault(name, Counter())[what] += 1

    def admissions(self) -> dict[str, AdmissionCounts]:
        """Return admission's counts by class; `fcfs` declines and preempts no request."""
        with self._lock:
            return {name: AdmissionCounts(**counts) for name, counts in self._admissions.items()}

    def stages(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Return (judged, attained) of each stage, in order, by class."""
        with self._lock:
            return {
                name: tuple((judged, attained) for judged, attained in each)
                for name, each in self._stages.items()
                if each
            }

    def counts(self) -> dict[str, SloCounts]:
        """Return the counts by class, without the percentiles, which `report` computes."""
        with self._lock:
            return {name: one.counts() for name, one in self._classes.items()}

    def report(self) -> SloReport:
        with self._lock:
            duration_s = max(0.0, self._last_s - self._first_s)
            classes = {name: one.figures(duration_s) for name, one in self._classes.items()}
            return SloReport(duration_s, self._total.figures(duration_s), classes)


class _Account:
    """Figures of one class, or of all; not thread-safe."""

    def __init__(self) -> None:
        self._counts = Counter[str]()  # by the names of `SloCounts`
        self._ttft_ms: deque[float | None] = deque(maxlen=_RECENT)
        self._tpot_ms: deque[float | None] = deque(maxlen=_RECENT)
        self._e2e_ms: deque[float | None] = deque(maxlen=_RECENT)

    def add(self, metrics: RequestMetrics, tokens: int) -> None:
        self._counts.update(
            requests=1,
            judged=int(metrics.attained is not None),
            attained=int(bool(metrics.attained)),
            tokens=tokens,
            attained_tokens=tokens if metrics.attained else 0,
        )
        implied_ms = None if metrics.objective is None else metrics.objective.implied_ttft_ms
        if implied_ms is not None and metrics.ttft_ms is not None:
            self._counts.update(implied=1, implied_kept=int(metrics.ttft_ms <= implied_ms))
        self._ttft_ms.append(metrics.ttft_ms)
        self._tpot_ms.append(metrics.tpot_ms)
        self._e2e_ms.append(metrics.e2e_ms)

    def counts(self) -> SloCounts:
        return SloCounts(**self._counts)

    def figures(self, duration_s: float) -> SloFigures:
        counts, per_s = self.counts(), 1 / duration_s if duration_s > 0 else 0.0
        return SloFigures(
            requests=counts.requests,
            judged=counts.judged,
            attained=counts.attained,
            attainment=counts.attained / counts.judged if counts.judged else None,
            tokens=counts.tokens,
            tokens_per_s=counts.tokens * per_s,
            goodput_tokens_per_s=counts.attained_tokens * per_s,
            ttft_ms=_percentiles(self._ttft_ms),
            tpot_ms=_percentiles(self._tpot_ms),
            e2e_ms=_percentiles(self._e2e_ms),
        )


def class_of(metrics: RequestMetrics) -> str:
    """Return the class name that a request is counted under."""
    return class_named(metrics.objective)


def class_named(objective: Objective | None) -> str:
    if objective is None:
        return NO_OBJECTIVE
    return objective.slo_class or BY_VALUE


def _percentiles(times_ms: Iterable[float | None]) -> Percentiles | None:
    known = [time_ms for time_ms in times_ms if time_ms is not None]
    if not known:
        return None
    return Percentiles(*(float(value) for value in np.percentile(known, (50, 95, 99))))
