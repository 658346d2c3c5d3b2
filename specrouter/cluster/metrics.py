"""What a cluster counts, and what it shows of its replicas.

Contract: a request that two replicas served is one request here, with the times that its caller
saw. Metrics are in Prometheus' form; sums over replicas stand under the engine's own names.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import reduce
from itertools import zip_longest
from typing import Any, TypeVar

from prometheus_client import Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from specrouter.cluster.link import ReplicaReport
from specrouter.cluster.member import Member
from specrouter.cluster.state import ReplicaState
from specrouter.engine.engine_state import EngineState
from specrouter.engine.request_meter import RequestMeter
from specrouter.engine.slo_accounts import AdmissionCounts, SloAccounts
from specrouter.request.output import RequestOutput

Figures = TypeVar("Figures")

# Among them `metrics_s` and `stale_s` by default, and the aim for 99%: 0.6.
AGE_BOUNDS_S = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5)


class ClusterAccounts(SloAccounts):
    """Args: `reports`: of the replicas, which count what their admission decides."""

    def __init__(self, reports: Callable[[], Sequence[ReplicaReport]], meter: RequestMeter) -> None:
        super().__init__()
        self._reports = reports
        self._meter = meter

    def ended(self, output: RequestOutput, elapsed_s: float) -> None:
        """A sample has ended, so long after it was submitted."""
        now_s = time.monotonic()
        self.record(output.metrics, output.metrics.output_tokens, now_s - elapsed_s, now_s)
        self._meter.record(output, elapsed_s)

    def admissions(self) -> dict[str, AdmissionCounts]:
        every = [report.admission_counts for report in self._reports()]
        return dict(total(every)) if every else {}


def total(every: Iterable[Figures]) -> Figures:
    """The sum of at least one: field by field of dataclasses, entry by entry of mappings and
    tuples, the union of sets."""
    return reduce(_added, every)


def counted_before(
    past: ReplicaReport | None, last: ReplicaReport, now: ReplicaReport
) -> ReplicaReport | None:
    """What a replica had counted before it began anew, `past` included: sums must not fall."""
    if now.statistics.cycles >= last.statistics.cycles:
        return past
    ended = replace(
        last,
        engine=replace(last.engine, tightest_tpot_ms=0.0),
        decisions=(),
        admissions=(),
        prefixes=(),
    )
    if past is None:
        return ended
    names = ("engine", "statistics", "decoded", "admission_counts")
    sums = {name: total([getattr(past, name), getattr(ended, name)]) for name in names}
    return replace(ended, **sums)


def total_state(every: Iterable[EngineState]) -> EngineState:
    """A sum, but for the tightest objective and the widest margin."""
    states = list(every)
    tightest = [one.tightest_tpot_ms for one in states if one.tightest_tpot_ms is not None]
    summed = total(replace(one, tightest_tpot_ms=0.0) for one in states)
    widest = max(one.pace_margin for one in states)
    return replace(summed, tightest_tpot_ms=min(tightest, default=None), pace_margin=widest)


def _added(one: Any, other: Any) -> Any:
    if is_dataclass(one) and not isinstance(one, type):
        names = [field.name for field in fields(one)]
        return type(one)(
            **{name: _added(getattr(one, name), getattr(other, name)) for name in names}
        )
    if isinstance(one, Mapping):
        shared = {key: _added(one[key], other[key]) for key in one if key in other}
        return {**one, **other, **shared}
    if isinstance(one, frozenset):
        return one | other
    if isinstance(one, tuple):
        return tuple(_added(a, b) for a, b in zip_longest(one, other, fillvalue=0))
    return one + other


def state_ages() -> Histogram:
    """Is told how old the state of every replica was at every decision."""
    return Histogram(
        "specrouter_replica_state_age_at_use_seconds",
        "How old what a replica had told was, when a request was routed by it.",
        buckets=AGE_BOUNDS_S,
        registry=None,
    )


def _now(value: Callable[[ReplicaState], float]) -> Callable[[Member], float | None]:
    """Of a replica that takes requests."""
    return lambda one: value(one.state) if one.state and one.standing == "ready" else None


def _age_s(member: Member) -> float | None:
    return None if member.told is None else time.monotonic() - member.told_s


_GAUGES: Sequence[tuple[str, str, Callable[[Member], float | None]]] = (
    ("up", "1 if a replica takes requests.", lambda one: one.standing == "ready"),
    ("state_age_seconds", "Since a replica told its state.", _age_s),
    ("requests_running", "Requests that are being decoded.", _now(lambda one: one.running)),
    ("requests_waiting", "Requests that wait to be admitted.", _now(lambda one: one.waiting)),
    ("request_rows", "Requests that can run together.", _now(lambda one: one.rows)),
    ("kv_usage_ratio", "Share of KV memory that is held.", _now(lambda one: one.kv_share)),
)


def replica_metrics(members: Collection[Member]) -> Iterator[Metric]:
    """Of each replica."""
    for name, text, value in _GAUGES:
        family = GaugeMetricFamily(f"specrouter_replica_{name}", text, labels=("replica",))
        for member in members:
            if (found := value(member)) is not None:
                family.add_metric((member.name,), found)
        yield family
    attempts = _counter("attempts", "Times that a sample was sent there.")
    declined = _counter("declined", "Of them, times that it declined.")
    moves = _counter(
        "moves", "Of them, times that the sample went on elsewhere, by cause.", "cause"
    )
    for member in members:
        attempts.add_metric((member.name,), member.attempts)
        declined.add_metric((member.name,), member.declined)
        for cause, count in member.moves.items():
            moves.add_metric((member.name, cause), count)
    yield from (attempts, declined, moves)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"specrouter_replica_{name}", text, labels=("replica", *labels))
