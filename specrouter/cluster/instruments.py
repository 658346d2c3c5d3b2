"""ClusterInstruments: measurements of all replicas together, as of their last reports.

Contract: a request that two replicas served counts as one, with the times that its caller saw.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

from prometheus_client.metrics_core import Metric

from specrouter.cluster.dispatcher import Dispatcher
from specrouter.cluster.fleet import Fleet
from specrouter.cluster.reports import ReplicaReport, total, total_state
from specrouter.engine.admission_log import AdmissionRecord
from specrouter.engine.cycle_log import CycleTimes
from specrouter.engine.decode_counts import DecodeFigures
from specrouter.engine.engine_state import EngineState
from specrouter.engine.prefix_record import PrefixRecord
from specrouter.engine.request_meter import RequestMeter, without_created
from specrouter.engine.serving import ReplicaFigures
from specrouter.engine.slo_accounts import AdmissionCounts, SloAccounts
from specrouter.profile.profiler import EngineStatistics
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.request.output import RequestOutput
from specrouter.routing.decision_record import DecisionRecord
from specrouter.view import SCHEDULED, ChainDecision

Record = TypeVar("Record", DecisionRecord, AdmissionRecord, PrefixRecord)


class ClusterAccounts(SloAccounts):
    """Accounts of the cluster; `reports` of the replicas hold the counts of their admission."""

    def __init__(self, reports: Callable[[], Sequence[ReplicaReport]], meter: RequestMeter) -> None:
        super().__init__()
        self._reports = reports
        self._meter = meter

    def ended(self, output: RequestOutput, elapsed_s: float) -> None:
        """Record a sample that ended `elapsed_s` after its submission."""
        now_s = time.monotonic()
        self.record(output.metrics, output.metrics.output_tokens, now_s - elapsed_s, now_s)
        self._meter.record(output, elapsed_s)

    def admissions(self) -> dict[str, AdmissionCounts]:
        every = [report.admission_counts for report in self._reports()]
        return dict(total(every)) if every else {}


class ClusterInstruments:
    """The `Instruments` of a cluster."""

    def __init__(self, fleet: Fleet, dispatcher: Dispatcher, meter: RequestMeter) -> None:
        self._fleet, self._dispatcher, self._meter = fleet, dispatcher, meter
        self.slo_accounts = ClusterAccounts(self._reports, meter)

    def performance(self) -> PerformanceSnapshot:
        """Return the estimates of one replica, the first with a report: they cannot be added."""
        return next(
            (one.performance for one in self._reports()),
            PerformanceSnapshot(times={}, parameters={}),
        )

    def statistics(self) -> EngineStatistics:
        return total([EngineStatistics(), *(one.statistics for one in self._reports())])

    def decoded(self) -> DecodeFigures:
        return total(one.decoded for one in self._reports())

    def engine_state(self) -> EngineState:
        """Return the state of all ready replicas together, or of all if none is ready.

        Counters are sums over all replicas in both cases.
        """
        members = [one for one in self._fleet.members.values() if one.report is not None]
        ready = [one for one in members if one.standing == "ready"] or members
        engines = [report.engine for report in self._reports()]
        return replace(
            total_state(one.report.engine for one in ready if one.report is not None),
            cache=total(one.cache for one in engines),
            quarantines=total(one.quarantines for one in engines),
            control_faults=total(one.control_faults for one in engines),
        )

    def ended_requests(self) -> Iterator[Metric]:
        yield from self._meter.collect()
        yield from map(without_created, self._dispatcher.ages.collect())

    def replicas(self) -> Mapping[str, ReplicaFigures]:
        now_s = time.monotonic()
        return {one.name: one.figures(now_s) for one in self._fleet.members.values()}

    def decision(self) -> ChainDecision | None:
        """Return the latest scheduled decision of any replica."""
        scheduled = [one for one in self.decisions() if one.asked == SCHEDULED]
        return scheduled[-1].decision if scheduled else None

    def cycles(self) -> Sequence[CycleTimes]:
        return ()

    def decisions(self) -> Sequence[DecisionRecord]:
        """Return the decisions of all replicas by time; the other records are sorted likewise."""
        return _by_time(report.decisions for report in self._reports())

    def admissions(self) -> Sequence[AdmissionRecord]:
        return _by_time(report.admissions for report in self._reports())

    def prefixes(self) -> Sequence[PrefixRecord]:
        return _by_time(report.prefixes for report in self._reports())

    def routings(self) -> Sequence[Mapping[str, Any]]:
        return self._dispatcher.records

    def _reports(self) -> list[ReplicaReport]:
        """Return the last report of each replica, then the counts from before restarts."""
        members = self._fleet.members.values()
        reports = [*(one.report for one in members), *(one.past for one in members)]
        return [report for report in reports if report is not None]


def _by_time(every: Iterable[Sequence[Record]]) -> Sequence[Record]:
    return sorted(chain.from_iterable(every), key=lambda record: record.unix_s)
