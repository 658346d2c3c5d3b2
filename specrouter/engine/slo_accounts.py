"""How many requests attained their objectives, by class and in total.

Contract: every request that ends is counted once, when it ends. May be told and asked by any
thread. Times come in as seconds of one clock; there is none here.
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
    """Of the requests of a class that have ended; see `SloFigures`. `attained_tokens` are those of
    requests that attained their objectives. `implied`: with an implied TTFT that had a first token;
    `implied_kept`: whose first token came by then."""

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
    """Of the requests of a class that have ended, or of all.

    Attributes:
        requests: all of them, cancelled and failed ones included.
        judged: those with an objective.
        attained: those that attained it.
        attainment: attained / judged; None where there is nothing to judge.
        tokens: that they produced.
        tokens_per_s: tokens / time.
        goodput_tokens_per_s: tokens of those that attained their objectives / time, which is that
            of the whole report: from the first submission to the latest end, of whichever class.
            So goodputs of classes add up to the total's.
        ttft_ms, tpot_ms, e2e_ms: over the last 1024 that ended, as far as they have one; None
            where none has. e2e: from submission to the last token.
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
    """`classes` by the name in the configuration; "default" are objectives that were given by
    value, "none" requests without one. `duration_s`: see `SloFigures`."""

    duration_s: float
    total: SloFigures
    classes: dict[str, SloFigures]


@dataclass(frozen=True)
class AdmissionCounts:
    """What admission decided about the requests of a class.

    Attributes:
        admitted: given a row for the first time, so that their objectives are attained.
        best_effort: given one for the first time without an objective, or after being declined.
        declined: whose objectives would not be attained; those that were rejected among them.
        rejected: ended, since they had asked for that.
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
        """A request has ended.

        Args:
            tokens: that it produced; those of an earlier attempt do not count.
            submitted_s, ended_s: of one clock, the same for all requests.
            stages_before: that had ended before its first token here.
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
        """Of a cycle: who was given a row, who was declined, and who lost the row."""
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
        """By class. `fcfs` declines and preempts nobody."""
        with self._lock:
            return {name: AdmissionCounts(**counts) for name, counts in self._admissions.items()}

    def stages(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """By class, of each stage in its order: how often it was judged, and attained."""
        with self._lock:
            return {
                name: tuple((judged, attained) for judged, attained in each)
                for name, each in self._stages.items()
                if each
            }

    def counts(self) -> dict[str, SloCounts]:
        """By class, without the percentiles that `report` has to work out."""
        with self._lock:
            return {name: one.counts() for name, one in self._classes.items()}

    def report(self) -> SloReport:
        with self._lock:
            duration_s = max(0.0, self._last_s - self._first_s)
            classes = {name: one.figures(duration_s) for name, one in self._classes.items()}
            return SloReport(duration_s, self._total.figures(duration_s), classes)


class _Account:
    """Not locked."""

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
    """The name that a request is counted under."""
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
