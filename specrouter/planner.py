"""RoutePlanner: from the scheduler's decisions to the groups of a cycle.

It keeps the decision that is in use, asks for a new one when it is due, honours what single
requests ask for, tries stale drafters on one request, and tells the profiler how predictions came
out. Every switch leaves a record with its alternatives.
"""

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specrouter.executor import ChainGroup, CyclePlan, CycleResult
from specrouter.params import Speculation
from specrouter.prediction import Chain, Option, PerformanceSnapshot, Workload
from specrouter.profiler import PerformanceProfiler, RequestRates
from specrouter.request import RunningRequest
from specrouter.scheduler import (
    FIXED_DEPTH,
    ChainDecision,
    ModelChainScheduler,
    fitting_rounds,
    fitting_width,
)

Ints = NDArray[np.int64]

_SNAPSHOT_CYCLES = 3  # that a snapshot is good for: taking one costs time
_EAGER_CYCLES, _EAGER_INTERVAL = 48, 3  # decisions are due in one cycle of so many at first,
_INTERVAL = 16  # and of so many later,
_OTHER_LOAD = 1.25  # or when the number of requests has changed by this factor
_PROBE_CYCLES = 3  # that a probe lasts, so that catching up is paid once
_AUDITION_CYCLES = 2  # of each of the drafters that a new request tries, with groups of requests
_AUDITIONED = 3
_AUDITION_LOSS = 1.15  # how much slower than the best a drafter may be and still be tried
_RECORDS = 256

_Override = tuple[int | None, int | None, int | None]  # depth, width, inner rounds
_SCHEDULED: _Override = (None, None, None)


class Reader(Protocol):
    """What the planner must know of the state."""

    def lags(self, rows: Ints) -> dict[str, float]: ...
    def slots_read(self, rows: Ints) -> int: ...


@dataclass(frozen=True)
class DecisionRecord:
    """A switch: what came into use, why, and what the alternatives were predicted to cost."""

    cycle: int
    unix_s: float
    requests: int
    decision: ChainDecision

    def to_json(self) -> dict[str, Any]:
        decision = self.decision
        return {
            "cycle": self.cycle,
            "unix_s": round(self.unix_s, 3),
            "requests": self.requests,
            "chain": list(decision.chain),
            "depth": decision.depth,
            "width": decision.width,
            "nodes": decision.nodes,
            "inner_rounds": decision.inner_rounds,
            "reason": decision.reason,
            "predicted": None if decision.predicted is None else _option_json(decision.predicted),
            "alternatives": [_option_json(option) for option in decision.alternatives],
        }


def _option_json(option: Option) -> dict[str, Any]:
    return {
        "chain": list(option.chain),
        "depth": option.depth,
        "width": option.width,
        "nodes": option.nodes,
        "inner_rounds": option.inner_rounds,
        "cycle_ms": round(option.cycle_ms, 3),
        "tokens_per_cycle": round(option.tokens, 3),
        "ms_per_token": round(option.ms_per_token, 3),
    }


@dataclass
class _InUse:
    """The decision for requests that leave the same things open."""

    decision: ChainDecision
    requests: int
    cycle: int  # of the decision
    since: int  # cycle at which decisions began


@dataclass
class _Probe:
    option: Option
    request: RunningRequest
    cycles: int


@dataclass
class RoutePlanner:
    scheduler: ModelChainScheduler
    profiler: PerformanceProfiler
    _in_use: dict[_Override, _InUse] = field(default_factory=dict)
    _records: deque[DecisionRecord] = field(default_factory=lambda: deque(maxlen=_RECORDS))
    _snapshot: PerformanceSnapshot | None = None
    _snapshot_cycle: int = 0
    _reading: int = 0
    _probe: _Probe | None = None
    _rates: dict[RunningRequest, RequestRates] = field(default_factory=dict)
    _foreseen_options: dict[tuple[Any, ...], tuple[int, Option | None]] = field(
        default_factory=dict
    )
    _expected: dict[int, Option] = field(default_factory=dict)  # by the index of a group

    @property
    def records(self) -> list[DecisionRecord]:
        return list(self._records)

    def groups(
        self,
        requests: Mapping[int, RunningRequest],
        cycle: int,
        available: Collection[str],
        reader: Reader,
        reading: int = 0,
    ) -> list[ChainGroup]:
        """Chains and trees for the decoding requests, by row.

        `reading`: requests whose prompts are still being read. They will soon decode beside these,
        so trees that would only pay for the few that decode already are not drafted.
        """
        self._reading = reading
        members: dict[tuple[Any, ...], list[int]] = {}
        predicted: dict[tuple[Any, ...], Option] = {}
        scheduled: dict[_Override, list[int]] = {}
        for row, request in requests.items():
            override = request.prompt.speculation
            if override == "off":
                members.setdefault(((self.scheduler.target,), 1, 1, None, 1, False), []).append(row)
            elif isinstance(override, Speculation) and override.chain is not None:
                members.setdefault(self._asked(override, available), []).append(row)
            else:
                key = _SCHEDULED
                if isinstance(override, Speculation):
                    key = (override.depth, override.width, override.inner_rounds)
                scheduled.setdefault(key, []).append(row)
        for key, rows in scheduled.items():
            chosen = {row: requests[row] for row in rows}
            for row, option, decision in self._scheduled(key, chosen, cycle, available, reader):
                depth = min(option.depth, key[0]) if key[0] else option.depth
                width = min(option.width, key[1]) if key[1] else option.width
                nodes = option.nodes or None
                route = (
                    option.chain,
                    depth or 1,
                    width,
                    nodes,
                    option.inner_rounds,
                    decision.hard_rejection,
                )
                members.setdefault(route, []).append(row)
                if option.plain_ms:
                    predicted[route] = option
        for route, rows in members.items():
            if route not in predicted:
                chosen = {row: requests[row] for row in rows}
                foreseen = self._foreseen(route, chosen, cycle, reader)
                if foreseen is not None:
                    predicted[route] = foreseen
        self._expected = {
            index: predicted[route] for index, route in enumerate(members) if route in predicted
        }
        return [
            ChainGroup(chain, depth, np.array(sorted(rows), np.int64), width, hard, nodes, rounds)
            for (chain, depth, width, nodes, rounds, hard), rows in members.items()
        ]

    def learn(self, plan: CyclePlan, result: CycleResult, elapsed_ms: float) -> None:
        """How a cycle came out."""
        gained = {commit.row: len(commit.tokens) for commit in result.commits}
        decoded = [row for group in plan.groups for row in group.rows.tolist()]
        self.profiler.record_cycle(
            elapsed_ms, sum(gained.values()), sum(row in gained for row in decoded)
        )
        if self._probe is not None:
            main = self._in_use.get(_SCHEDULED)
            if main is not None and main.decision.predicted is not None:
                self.profiler.record_probe(elapsed_ms - main.decision.predicted.cycle_ms)
            self._probe.cycles -= 1
            if self._probe.cycles <= 0 or self._probe.request.finished:
                self._probe = None
        if not result.is_regular or result.failures or len(plan.prefill_rows):
            return
        for index, option in self._expected.items():
            rows = [row for row in plan.groups[index].rows.tolist() if row in gained]
            extra = float(sum(gained[row] - 1 for row in rows))
            alone = len(plan.groups) == 1
            self.profiler.record_outcome(
                option.chain,
                len(plan.groups[index].rows),
                option.plain_ms if alone else 0.0,
                elapsed_ms,
                (option.plain_tokens - 1.0) * len(rows),
                extra,
            )

    def learn_requests(
        self, plan: CyclePlan, result: CycleResult, requests: Mapping[int, RunningRequest]
    ) -> None:
        """What a cycle brought each request, where requests may differ."""
        if self._snapshot is None or self.scheduler.config.groups == "one":
            return
        gained = {commit.row: len(commit.tokens) for commit in result.commits}
        for index, option in self._expected.items():
            for row in plan.groups[index].rows.tolist():
                if row in gained:
                    rates = self._rates.setdefault(requests[row], RequestRates())
                    rates.record(option.chain[:-1], gained[row] - 1.0, option.tokens - 1.0)

    def forget(self, request: RunningRequest) -> None:
        self._rates.pop(request, None)

    def _foreseen(
        self,
        route: tuple[Any, ...],
        requests: Mapping[int, RunningRequest],
        cycle: int,
        reader: Reader,
    ) -> Option | None:
        """The prediction for a route that nobody predicted, so that its outcomes teach too."""
        asked_at, option = self._foreseen_options.get(route, (-_INTERVAL, None))
        if cycle - asked_at >= _INTERVAL:
            rows = np.array(sorted(requests), dtype=np.int64)
            workload = _workload(list(requests.values()), rows, reader)
            chain, depth, width, nodes, rounds, hard = route
            if hard:
                return None
            snapshot = self.profiler.snapshot()
            option = self.scheduler.predict(snapshot, workload, chain, depth, width, nodes, rounds)
            self._foreseen_options[route] = (cycle, option)
        return option

    def _asked(self, override: Speculation, available: Collection[str]) -> tuple[Any, ...]:
        """The route of a request that names its chain."""
        assert override.chain is not None
        target = self.scheduler.target
        limits = self.scheduler.limits(override.depth, override.width, override.inner_rounds)
        chain = (*(name for name in override.chain[:-1] if name in available), target)
        depth = limits.depth or FIXED_DEPTH
        width = fitting_width(depth, limits.width or 1)
        hard = self.scheduler.config.policy == "paper"
        rounds = fitting_rounds(depth, limits.inner_rounds or 1)
        return chain, depth, width, limits.nodes, rounds, hard

    def _scheduled(
        self,
        key: _Override,
        requests: Mapping[int, RunningRequest],
        cycle: int,
        available: Collection[str],
        reader: Reader,
    ) -> "list[tuple[int, Option, ChainDecision]]":
        """What each of the requests goes through that leave the chain to the scheduler."""
        rows = np.array(sorted(requests), dtype=np.int64)
        in_use = self._in_use.get(key)
        if in_use is None or self._is_due(in_use, cycle, len(rows) + self._reading, available):
            in_use = self._decide(key, in_use, requests, rows, cycle, available, reader)
        decision = in_use.decision
        main = decision.predicted or _unpredicted(decision)
        chosen = dict.fromkeys(requests, main)
        if self.scheduler.config.groups == "requests" and decision.predicted is not None:
            chosen = self._split(decision, requests, reader, rows)
        if self._probe is not None and key == _SCHEDULED:
            for row, request in requests.items():
                if request is self._probe.request:
                    chosen[row] = self._probe.option
        return [(row, option, decision) for row, option in chosen.items()]

    def _is_due(
        self, in_use: _InUse, cycle: int, requests: int, available: Collection[str]
    ) -> bool:
        decision = in_use.decision
        target = self.scheduler.target
        if any(name not in available and name != target for name in decision.chain):
            return True
        eager = cycle - in_use.since < _EAGER_CYCLES
        if cycle - in_use.cycle >= (_EAGER_INTERVAL if eager else _INTERVAL):
            return True
        low, high = sorted((requests, in_use.requests))
        return high > _OTHER_LOAD * low

    def _decide(
        self,
        key: _Override,
        before: _InUse | None,
        requests: Mapping[int, RunningRequest],
        rows: Ints,
        cycle: int,
        available: Collection[str],
        reader: Reader,
    ) -> _InUse:
        depth, width, rounds = key
        if self._snapshot is None or cycle - self._snapshot_cycle >= _SNAPSHOT_CYCLES:
            self._snapshot, self._snapshot_cycle = self.profiler.snapshot(), cycle
        snapshot = self._snapshot
        workload = _workload(list(requests.values()), rows, reader)
        workload = replace(workload, requests=len(rows) + self._reading)
        current = None if before is None else before.decision
        decision = self.scheduler.choose(
            snapshot, workload, available, current, depth, width, rounds
        )
        in_use = _InUse(
            decision, workload.requests, cycle, cycle if before is None else before.since
        )
        self._in_use[key] = in_use
        if current is None or decision.route != current.route:
            self.profiler.record_switch()
            self._records.append(DecisionRecord(cycle, time.time(), len(rows), decision))
        if decision.probe is not None and self._probe is None and key == _SCHEDULED:
            shortest = min(requests.values(), key=lambda request: len(request.prompt.committed))
            self._probe = _Probe(decision.probe, shortest, _PROBE_CYCLES)
            self._snapshot = None  # it says that the drafter is idle
        return in_use

    def _split(
        self,
        decision: ChainDecision,
        requests: Mapping[int, RunningRequest],
        reader: Reader,
        rows: Ints,
    ) -> dict[int, Option]:
        assert decision.predicted is not None
        assert self._snapshot is not None
        main = decision.predicted
        if len(main.chain) != 2:
            return dict.fromkeys(requests, main)
        tried = [
            option
            for option in (main, *decision.alternatives)
            if len(option.chain) == 2 and option.ms_per_token < _AUDITION_LOSS * main.ms_per_token
        ][:_AUDITIONED]
        chosen: dict[int, Option] = {}
        settled: list[int] = []
        for row, request in requests.items():
            turn = request.cycles // _AUDITION_CYCLES
            if turn < len(tried):
                chosen[row] = tried[turn]
            else:
                settled.append(row)
        factors = []
        for row in settled:
            rates = self._rates.get(requests[row], RequestRates())
            factors.append({option.chain[:-1]: rates.factor(option.chain[:-1]) for option in tried})
        workload = _workload([requests[row] for row in settled], rows, reader) if settled else None
        if workload is not None:
            options = self.scheduler.split(self._snapshot, workload, decision, factors)
            chosen.update(zip(settled, options, strict=True))
        return chosen


def _workload(requests: Sequence[RunningRequest], rows: Ints, reader: Reader) -> Workload:
    sampled = sum(request.prompt.params.temperature > 0 for request in requests)
    remaining = sum(request.remaining for request in requests) / max(1, len(requests))
    return Workload(
        len(requests),
        reader.slots_read(rows),
        remaining,
        reader.lags(rows),
        2 * sampled >= len(requests),
    )


def _unpredicted(decision: ChainDecision) -> Option:
    """Of a policy that predicts nothing."""
    return Option(
        decision.chain,
        decision.depth,
        decision.width,
        decision.nodes or 0,
        decision.inner_rounds,
    )


__all__ = ["Chain", "DecisionRecord", "RoutePlanner"]
