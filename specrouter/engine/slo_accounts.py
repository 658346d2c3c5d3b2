"""How many requests attained their objectives, by class and in total.

Contract: every request that ends is counted once, when it ends. May be told and asked by any
thread. Times come in as seconds of one clock; there is none here.
"""

import math
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from specrouter.request.objective import BY_VALUE, NO_OBJECTIVE
from specrouter.request.output import RequestMetrics

_RECENT = 1024  # requests whose times the percentiles describe


@dataclass(frozen=True)
class Percentiles:
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True)
class SloCounts:
    """Of the requests of a class that have ended; see `SloFigures`. `attained_tokens` are those of
    requests that attained their objectives."""

    requests: int = 0
    judged: int = 0
    attained: int = 0
    tokens: int = 0
    attained_tokens: int = 0


@dataclass(frozen=True)
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


class SloAccounts:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = _Account()
        self._classes: dict[str, _Account] = {}
        self._first_s, self._last_s = math.inf, -math.inf

    def record(
        self, metrics: RequestMetrics, tokens: int, submitted_s: float, ended_s: float
    ) -> None:
        """A request has ended.

        Args:
            tokens: that it produced; those of an earlier attempt do not count.
            submitted_s, ended_s: of one clock, the same for all requests.
        """
        with self._lock:
            self._first_s = min(self._first_s, submitted_s)
            self._last_s = max(self._last_s, ended_s)
            own = self._classes.setdefault(class_of(metrics), _Account())
            for account in (own, self._total):
                account.add(metrics, tokens)

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
        self._requests = self._judged = self._attained = 0
        self._tokens = self._attained_tokens = 0
        self._ttft_ms: deque[float | None] = deque(maxlen=_RECENT)
        self._tpot_ms: deque[float | None] = deque(maxlen=_RECENT)
        self._e2e_ms: deque[float | None] = deque(maxlen=_RECENT)

    def add(self, metrics: RequestMetrics, tokens: int) -> None:
        self._requests += 1
        self._judged += metrics.attained is not None
        self._tokens += tokens
        if metrics.attained:
            self._attained += 1
            self._attained_tokens += tokens
        self._ttft_ms.append(metrics.ttft_ms)
        self._tpot_ms.append(metrics.tpot_ms)
        self._e2e_ms.append(metrics.e2e_ms)

    def counts(self) -> SloCounts:
        return SloCounts(
            self._requests, self._judged, self._attained, self._tokens, self._attained_tokens
        )

    def figures(self, duration_s: float) -> SloFigures:
        per_s = 1 / duration_s if duration_s > 0 else 0.0
        return SloFigures(
            requests=self._requests,
            judged=self._judged,
            attained=self._attained,
            attainment=self._attained / self._judged if self._judged else None,
            tokens=self._tokens,
            tokens_per_s=self._tokens * per_s,
            goodput_tokens_per_s=self._attained_tokens * per_s,
            ttft_ms=_percentiles(self._ttft_ms),
            tpot_ms=_percentiles(self._tpot_ms),
            e2e_ms=_percentiles(self._e2e_ms),
        )


def class_of(metrics: RequestMetrics) -> str:
    """The name that a request is counted under."""
    if metrics.objective is None:
        return NO_OBJECTIVE
    return metrics.objective.slo_class or BY_VALUE


def _percentiles(times_ms: Iterable[float | None]) -> Percentiles | None:
    known = [time_ms for time_ms in times_ms if time_ms is not None]
    if not known:
        return None
    return Percentiles(*(float(value) for value in np.percentile(known, (50, 95, 99))))
