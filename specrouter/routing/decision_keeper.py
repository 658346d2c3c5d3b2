"""DecisionKeeper: the decisions in use, and when they are made anew.

It asks the scheduler for a decision when one is due, keeps it for all requests that leave the same
things open, and leaves a record of every switch with its alternatives.

Not here: what a single cycle makes of a decision (`specrouter.routing.planner`).
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specrouter.cycle import CyclePlan
from specrouter.profile.prediction import Workload
from specrouter.profile.profiler import PerformanceProfiler
from specrouter.profile.snapshot import Mode, PerformanceSnapshot
from specrouter.request.params import Chain
from specrouter.request.running import RunningRequest
from specrouter.routing.catch_up import payable
from specrouter.routing.decision_record import DecisionRecord
from specrouter.routing.scheduler import ChainDecision, ModelChainScheduler, Models

Ints = NDArray[np.int64]

INTERVAL = 16  # cycles after which a decision is due again,
_EAGER_INTERVAL, _EAGER_SHARE = 3, 4  # at first after 3 or a quarter of those so far,
_OTHER_LOAD = 1.25  # or when the number of requests has changed by this factor
_SNAPSHOT_CYCLES = 3  # that a snapshot is good for: taking one costs time
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
    def evaluable(self, model: str, rows: Ints) -> Ints: ...
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
class DecisionKeeper:
    scheduler: ModelChainScheduler
    profiler: PerformanceProfiler
    prefill_chunk: int
    evaluated_at: int = -1  # cycle of the last shadow evaluation
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

    def end_cycle(self, plan: CyclePlan) -> None:
        """There is news after a shadow evaluation."""
        if plan.shadow_evaluation is not None:
            self._snapshot = None

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
        return decision

    def put_away(self) -> None:
        """Keeps what was decided and none of its predictions, so that all decisions are due."""
        self._snapshot = None
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
        if in_use.cycle <= self.evaluated_at < cycle:
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
