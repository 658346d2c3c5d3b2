"""ReplicaReport: figures of a replica's engine for display, and sums of several reports."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import reduce
from itertools import zip_longest
from typing import Any, TypeVar

from specrouter.engine.admission_log import AdmissionRecord
from specrouter.engine.decode_counts import DecodeFigures
from specrouter.engine.engine_state import EngineState
from specrouter.engine.prefix_record import PrefixRecord
from specrouter.engine.slo_accounts import AdmissionCounts
from specrouter.profile.profiler import EngineStatistics
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.routing.decision_record import DecisionRecord

Figures = TypeVar("Figures")


@dataclass(frozen=True, kw_only=True)
class ReplicaReport:
    """Figures of a replica's engine for display; see `ChainRouter` for each."""

    engine: EngineState
    statistics: EngineStatistics
    decoded: DecodeFigures
    performance: PerformanceSnapshot
    decisions: tuple[DecisionRecord, ...]
    admissions: tuple[AdmissionRecord, ...]
    prefixes: tuple[PrefixRecord, ...]
    admission_counts: Mapping[str, AdmissionCounts]


def total(every: Iterable[Figures]) -> Figures:
    """Return the sum of at least one value.

    Dataclasses are added by field, mappings and tuples by entry; sets are united. None adds
    nothing.
    """
    return reduce(_added, every)


def counted_before(
    past: ReplicaReport | None, last: ReplicaReport, now: ReplicaReport
) -> ReplicaReport | None:
    """Return the counts from before the replica's last restart, so that sums never fall.

    `past` is included.
    """
    if now.statistics.cycles >= last.statistics.cycles:
        return past
    ended = replace(last, decisions=(), admissions=(), prefixes=())
    names = ("engine", "statistics", "decoded", "admission_counts")
    sums = {name: _added(getattr(past, name, None), getattr(last, name)) for name in names}
    return replace(ended, **sums)


def total_state(every: Iterable[EngineState]) -> EngineState:
    """Return the sum of states, with the tightest objective and the first speedups of all."""
    states = list(every)
    tightest = [one.tightest_tpot_ms for one in states if one.tightest_tpot_ms is not None]
    return replace(
        total(states),
        tightest_tpot_ms=min(tightest, default=None),
        speedups=next((one.speedups for one in states if one.speedups), {}),
    )


def _added(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
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
