"""DecisionKeeper: the decisions in use, and when they are made anew.

It asks the scheduler for a decision when one is due, keeps it for all requests that leave the same
things open, leaves a record of every switch with its alternatives, and has stale drafters tried on
one request (a probe) where they cannot be heard (`specrouter.execution.auditor`).

Not here: what a single cycle makes of a decision (`specrouter.routing.planner`).
"""

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specrouter.cycle import CyclePlan
from specrouter.profile.prediction import Option, Workload, forward_ms
from specrouter.profile.profiler import PerformanceProfiler
from specrouter.profile.snapshot import Mode, PerformanceSnapshot
from specrouter.request.params import Chain
from specrouter.request.running import RunningRequest
from specrouter.routing.audition_policy import EXPLORED_SHARE
from specrouter.routing.catch_up import payable
from specrouter.routing.decision_record import DecisionRecord
from specrouter.routing.scheduler import ChainDecision, ModelChainScheduler, Models

Ints = NDArray[np.int64]

INTERVAL = 16  # cycles after which a decision is due again,
_EAGER_INTERVAL, _EAGER_SHARE = 3, 4  # at first after 3 or a quarter of those so far,
_OTHER_LOAD = 1.25  # or when the number of requests has changed by this factor
_SNAPSHOT_CYCLES = 3  # that a snapshot is good for: taking one costs time
_PROBE_CYCLES = 3  # that a probe lasts, so that catching up is paid once
_RECORDS = 256
_MOST_KEYS = 64  # ways to leave things open that decisions are kept for

Override = tuple[int | None, int | None]  # depth, width
SCHEDULED: Override = (None, None)


class Reader(Protocol):
    """What must be known of the state."""

    def lags(self, rows: Ints) -> dict[str, float]: ...
    def slots_read(self, rows: Ints) -> int: ...
    def slots_of(self, rows: Ints) -> Ints: ...
    def missed(self, model: str, rows: Ints) -> Ints: ...
    def unheard(self, model: str, rows: Ints) -> Ints: ...
    def is_open(self, model: str) -> bool: ...


@dataclass(frozen=True, eq=False)
class InUse:
    """The decision for requests that leave the same things open."""

    decision: ChainDecision
    requests: int
    others: int  # that decode beside them
    cycle: int  # of the decision
    since: int  # cycle at which decisions began


@dataclass
class Probe:
    option: Option
    row: int
    request: RunningRequest
    cycles: int  # that are left, those not counted in which its drafter still lags


@dataclass
class DecisionKeeper:
    scheduler: ModelChainScheduler
    profiler: PerformanceProfiler
    prefill_chunk: int
    probe: Probe | None = None
    heard_at: int = -1  # cycle of the last audition
    _in_use: dict[Override, InUse] = field(default_factory=dict)
    _records: deque[DecisionRecord] = field(default_factory=lambda: deque(maxlen=_RECORDS))
    _snapshot: PerformanceSnapshot | None = None
    _snapshot_cycle: int = 0

    @property
    def records(self) -> list[DecisionRecord]:
        return list(self._records)

    @property
    def main(self) -> InUse | None:
        """Of requests that leave everything open."""
        return self._in_use.get(SCHEDULED)

    @property
    def latest(self) -> PerformanceSnapshot:
        """What decisions were made from last."""
        return self._snapshot or self.profiler.snapshot()

    def snapshot(self, cycle: int, age: int = INTERVAL) -> PerformanceSnapshot:
        """At most so many cycles old."""
        if self._snapshot is None or cycle - self._snapshot_cycle >= age:
            self._snapshot, self._snapshot_cycle = self.profiler.snapshot(), cycle
        return self._snapshot

    def chain(self, key: Override) -> Chain:
        """In use for requests of a key; the target alone before their first decision."""
        in_use = self._in_use.get(key)
        return (self.scheduler.target,) if in_use is None else in_use.decision.chain

    def end_unable_probe(self, available: Collection[str], wanted: Collection[str]) -> None:
        """Ends a probe of models that may not be used any more: it may be what they failed in.

        `wanted`: models of the cycle, none of which a probe may evict.
        """
        models = Models(available, frozenset(wanted))
        if self.probe and not self.scheduler.may_use(self.probe.option.chain, models):
            self.probe = None

    def end_cycle(self, plan: CyclePlan, elapsed_ms: float, behind: Collection[int] = ()) -> None:
        """What a cycle with a probe or an audition leaves behind.

        `behind`: rows that decoded without a draft, since their drafters lag.
        """
        if self.probe is not None:
            usual = None if self.main is None else self.main.decision.predicted
            # Prompts that came since are others' time. What a probe reads or loads it does at once.
            if usual is not None and not len(plan.prefill_rows):
                usual_ms = self.latest.machine * usual.cycle_ms
                self.profiler.record_probe(elapsed_ms - usual_ms)
            self.probe.cycles -= self.probe.row not in behind
            if self.probe.cycles <= 0 or self.probe.request.finished:
                self.probe = None
                self._snapshot = None  # it may still say that the drafter is idle
        if plan.audition is not None:
            self._snapshot = None  # there is news

    def in_use(
        self,
        key: Override,
        requests: Mapping[int, RunningRequest],
        rows: Ints,
        reading: int,
        others: int,
        cycle: int,
        models: Models,
        reader: Reader,
    ) -> ChainDecision:
        """For the requests of a key, by row; made anew if it is due.

        Args:
            reading: further requests, whose prompts are not read yet.
            others: that decode beside these, by another decision or none.
        """
        before, load = self._in_use.get(key), len(rows) + reading
        if before is not None and not self.is_due(before, cycle, load, others, models):
            return before.decision
        depth, width = key
        snapshot = self.snapshot(cycle, _SNAPSHOT_CYCLES)
        workload = workload_of(list(requests.values()), rows, reader)
        workload = replace(workload, requests=load, others=others)
        remaining = np.array([requests[row].remaining for row in rows.tolist()])
        workload = payable(
            snapshot, workload, self.scheduler.target, rows, remaining, reader, self.prefill_chunk
        )
        current = None if before is None else before.decision
        decision = self.scheduler.choose(snapshot, workload, models, current, depth, width)
        if key not in self._in_use:
            self._forget_unused()
        since = cycle if before is None else before.since
        self._in_use[key] = InUse(decision, load, others, cycle, since)
        if current is None or decision.route != current.route:
            self.profiler.record_switch()
            kept = replace(decision, grids={}, at_hand=())  # predictions that nobody asks for
            able = tuple(sorted(models.available))
            self._records.append(DecisionRecord(cycle, time.time(), len(rows), kept, key, able))
        if decision.probe is not None and self.probe is None and key == SCHEDULED and not reading:
            able_rows = rows_of_mode(requests, rows, workload.sampled)
            behind = reader.missed(decision.probe.chain[0], able_rows)
            row = int(able_rows[np.argmin(behind)])
            probe = Probe(decision.probe, row, requests[row], _PROBE_CYCLES)
            self._try(probe, workload, int(behind.min()))
        return decision

    def _try(self, probe: Probe, workload: Workload, behind: int) -> None:
        """Begins a probe if its drafter's reading of `behind` tokens fits what is left for that."""
        snapshot, name = self.latest, probe.option.chain[0]
        price_ms = forward_ms(snapshot, name, self.scheduler.target, workload, behind)
        if price_ms <= snapshot.exploration_ms(EXPLORED_SHARE):
            self.probe = probe
            self.profiler.record_probe_begun()
            self._snapshot = None  # it says that the drafter is idle

    def put_away(self) -> None:
        """Keeps what was decided and none of its predictions, so that all decisions are due."""
        self.probe, self._snapshot = None, None
        self._in_use = {
            key: replace(
                in_use, decision=replace(in_use.decision, grids={}), cycle=in_use.cycle - INTERVAL
            )
            for key, in_use in self._in_use.items()
        }

    def _forget_unused(self) -> None:
        """Keys are what callers ask for, and each holds its predictions."""
        others = [key for key in self._in_use if key != SCHEDULED]
        if len(others) >= _MOST_KEYS:
            del self._in_use[min(others, key=lambda key: self._in_use[key].cycle)]

    def is_due(self, in_use: InUse, cycle: int, requests: int, others: int, models: Models) -> bool:
        if not self.scheduler.may_use(in_use.decision.chain, models):
            return True
        if in_use.cycle <= self.heard_at < cycle:
            return True
        eager = max(_EAGER_INTERVAL, (cycle - in_use.since) // _EAGER_SHARE)
        if cycle - in_use.cycle >= min(eager, INTERVAL):
            return True
        before = in_use.requests
        return _differ(requests, before) or _differ(requests + others, before + in_use.others)


def _differ(load: int, before: int) -> bool:
    return max(load, before) > _OTHER_LOAD * min(load, before)


def rows_of_mode(requests: Mapping[int, RunningRequest], rows: Ints, sampled: Mode) -> Ints:
    """Those of the rows whose tokens are sampled, or not."""
    return np.array([row for row in rows.tolist() if is_sampled(requests[row]) == sampled])


def is_sampled(request: RunningRequest) -> Mode:
    return request.spec.params.temperature > 0


def workload_of(requests: Sequence[RunningRequest], rows: Ints, reader: Reader) -> Workload:
    sampled = sum(map(is_sampled, requests))
    remaining = sum(request.remaining for request in requests) / max(1, len(requests))
    return Workload(
        len(requests),
        reader.slots_read(rows),
        remaining,
        reader.lags(rows),
        2 * sampled >= len(requests),
    )
