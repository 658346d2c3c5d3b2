"""Groups of a cycle, and what is remembered of decisions and of how they came out."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from specrouter.config import SchedulerConfig
from specrouter.executor import (
    ChainGroup,
    Commit,
    CyclePlan,
    CycleResult,
    ModelFailure,
)
from specrouter.params import SamplingParams, Speculation
from specrouter.planner import RoutePlanner
from specrouter.prediction import Chain, PerformanceSnapshot
from specrouter.profiler import PerformanceProfiler
from specrouter.request import Prompt, RunningRequest, SpeculationOverride
from specrouter.scheduler import ModelChainScheduler
from tests.specrouter.predictions import (
    ALL,
    NAMES,
    PAIR,
    PARAMETERS,
    TRIPLE,
    flat,
    rising,
    snapshot,
)

Ints = NDArray[np.int64]
ALONE: Chain = ("big",)
TWIN = ("twin", "big")
NOBODY: Ints = np.zeros(0, dtype=np.int64)
TIMES = {"small": flat(1.0), "twin": flat(1.0), "middle": flat(90.0), "big": rising(50.0)}
GOOD = snapshot(TIMES, {PAIR: 0.6, TWIN: 0.3})
TURNED = snapshot(TIMES, {PAIR: 0.3, TWIN: 0.6})
LATE = 1000  # a cycle in which decisions are not so frequent any more


class Profiler:
    """Knows what it is told to know, and notes what is recorded."""

    def __init__(self, known: PerformanceSnapshot) -> None:
        self.known = known
        self.looks = 0
        self.switches = 0
        self.probes: list[float] = []
        self.cycles: list[tuple[float, int, int]] = []
        self.outcomes: list[tuple[Any, ...]] = []

    def snapshot(self) -> PerformanceSnapshot:
        self.looks += 1
        return self.known

    def record_switch(self) -> None:
        self.switches += 1

    def record_probe(self, extra_ms: float) -> None:
        self.probes.append(extra_ms)

    def record_cycle(self, elapsed_ms: float, committed: int, requests: int) -> None:
        self.cycles.append((elapsed_ms, committed, requests))

    def record_outcome(self, *outcome: Any) -> None:
        self.outcomes.append(outcome)


class Reader:
    def lags(self, rows: Ints) -> dict[str, float]:
        return dict.fromkeys(NAMES, 0.0)

    def slots_read(self, rows: Ints) -> int:
        return 128


class Request:
    """What a planner looks at of a `RunningRequest`."""

    def __init__(self, speculation: SpeculationOverride = None, length: int = 4) -> None:
        self.prompt = Prompt((1,) * length, (), SamplingParams(), speculation, 0)
        self.remaining = 64
        self.cycles = 0
        self.finished = False


class Plan:
    """A planner, the requests in its rows, and the cycle that it is in."""

    def __init__(
        self, *requests: Request, known: PerformanceSnapshot = GOOD, **settings: Any
    ) -> None:
        self.profiler = Profiler(known)
        config = SchedulerConfig.model_validate(settings)
        self.scheduler = ModelChainScheduler(config, NAMES, PARAMETERS, "big")
        self.planner = RoutePlanner(self.scheduler, cast(PerformanceProfiler, self.profiler))
        self.requests = dict(enumerate(requests))
        self.at = 0
        self.available = ALL

    def groups(self, cycle: int | None = None) -> list[ChainGroup]:
        self.at = self.at + 1 if cycle is None else cycle
        running = cast(Mapping[int, RunningRequest], self.requests)
        return self.planner.groups(running, self.at, self.available, Reader())

    def settle(self) -> None:
        """Past the cycles in which decisions are frequent."""
        self.groups(0)
        self.groups(LATE)

    def learn(
        self,
        groups: list[ChainGroup],
        gained: Mapping[int, int],
        elapsed_ms: float = 60.0,
        prefill: Ints = NOBODY,
        **result: Any,
    ) -> None:
        commits = [Commit(row, [7] * count, PAIR) for row, count in gained.items()]
        plan = CyclePlan(groups, prefill, prefill)
        came = CycleResult(commits, **result)
        self.planner.learn_requests(plan, came, cast(Mapping[int, RunningRequest], self.requests))
        self.planner.learn(plan, came, elapsed_ms)

    def chains(self) -> dict[int, Chain]:
        return {row: group.chain for group in self.groups() for row in group.rows.tolist()}


# Decisions


def test_requests_that_leave_everything_open_are_one_group() -> None:
    [group] = Plan(Request(), Request(), Request()).groups()
    assert group.chain == PAIR
    assert group.rows.tolist() == [0, 1, 2]
    assert group.nodes is not None
    assert not group.hard_rejection


def test_a_decision_is_kept_between_due_cycles() -> None:
    plan = Plan(Request())
    plan.settle()
    plan.profiler.known = TURNED
    changed = [plan.groups()[0].chain == TWIN for _ in range(20)]
    assert not changed[0]
    assert changed.index(True) == 15  # the sixteenth cycle after the last decision
    assert all(changed[15:])
    assert plan.profiler.looks < 8


def test_decisions_are_frequent_at_first() -> None:
    plan = Plan(Request())
    plan.groups()
    plan.profiler.known = TURNED
    assert TWIN in [plan.groups()[0].chain for _ in range(4)]


def test_another_load_or_a_model_that_is_gone_makes_a_decision_due() -> None:
    plan = Plan(Request())
    plan.settle()
    plan.profiler.known = TURNED
    plan.requests[1] = Request()
    assert plan.groups(LATE + 5)[0].chain == TWIN
    plan.available = ALL - {"twin"}
    assert plan.groups()[0].chain == PAIR


def test_a_switch_leaves_a_record_with_reason_and_alternatives() -> None:
    plan = Plan(Request())
    plan.settle()
    plan.groups()
    plan.profiler.known = TURNED
    plan.groups(LATE + 100)
    first, second = plan.planner.records
    assert plan.profiler.switches == 2
    assert (first.decision.chain, first.decision.reason) == (PAIR, "first decision")
    assert second.decision.chain == TWIN
    assert "faster by" in second.decision.reason
    assert (second.cycle, second.requests) == (LATE + 100, 1)
    shown = json.loads(json.dumps(second.to_json()))
    assert shown["chain"] == ["twin", "big"]
    assert shown["cycle"] == LATE + 100
    assert shown["reason"] == second.decision.reason
    assert shown["predicted"]["chain"] == ["twin", "big"]
    assert ["small", "big"] in [option["chain"] for option in shown["alternatives"]]
    parts = {"chain", "depth", "width", "nodes", "inner_rounds"}
    costs = {"cycle_ms", "tokens_per_cycle", "ms_per_token"}
    for option in [shown["predicted"], *shown["alternatives"]]:
        assert set(option) == parts | costs
    assert set(shown) == parts | {
        "cycle",
        "unix_s",
        "requests",
        "reason",
        "predicted",
        "alternatives",
    }


def test_a_policy_that_predicts_nothing_leaves_records_too() -> None:
    plan = Plan(Request(), policy="static", chain=TRIPLE)
    [group] = plan.groups()
    assert (group.chain, group.depth, group.width, group.nodes) == (TRIPLE, 4, 1, None)
    [record] = plan.planner.records
    assert record.to_json()["predicted"] is None
    assert record.to_json()["reason"] == "configured"


def test_the_papers_policy_rejects_hard() -> None:
    times = {"small": flat(1.0), "big": flat(100.0)}
    plan = Plan(Request(), known=snapshot(times, similarity={PAIR: 0.99}), policy="paper", depth=2)
    plan.available = frozenset({"small"})
    [group] = plan.groups()
    assert (group.chain, group.hard_rejection) == (PAIR, True)


# What requests ask for


def test_requests_are_grouped_by_what_they_ask_for() -> None:
    named = Speculation(chain=TRIPLE, depth=2, width=3, inner_rounds=2)
    plan = Plan(Request(), Request("off"), Request(named), Request(), Request(named))
    groups = {tuple(group.rows.tolist()): group for group in plan.groups()}
    assert set(groups) == {(0, 3), (1,), (2, 4)}
    assert groups[1,].chain == ALONE
    asked = groups[2, 4]
    assert (asked.chain, asked.depth, asked.width) == (TRIPLE, 2, 3)
    assert (asked.nodes, asked.inner_rounds) == (None, 2)


def test_a_named_chain_goes_without_the_models_that_rest() -> None:
    plan = Plan(Request(Speculation(chain=TRIPLE)))
    plan.available = ALL - {"middle"}
    [group] = plan.groups()
    assert (group.chain, group.depth, group.width) == (PAIR, 4, 1)


def test_what_a_request_asks_for_never_exceeds_the_largest_tree_and_path() -> None:
    plan = Plan(
        Request(Speculation(chain=PAIR, width=8)),
        Request(Speculation(chain=TRIPLE, inner_rounds=4)),
        depth=16,
    )
    wide, long = plan.groups()
    assert (wide.depth, wide.width) == (16, 4)
    assert (long.depth, long.inner_rounds) == (16, 1)


def test_a_request_may_ask_for_a_depth_and_leave_the_chain_to_the_scheduler() -> None:
    plan = Plan(Request(Speculation(depth=3, width=1)), Request(Speculation(depth=7)), Request())
    depths = {int(group.rows[0]): group for group in plan.groups()}
    assert (depths[0].chain, depths[0].depth, depths[0].width) == (PAIR, 3, 1)
    assert depths[1].chain == PAIR
    assert depths[1].depth == 7  # between the shapes that are predicted
    assert len(plan.planner.records) == 3


# Probes

STALE = replace(GOOD, idle_cycles={"twin": 10_000})


def test_a_probe_runs_on_the_shortest_context_for_three_cycles() -> None:
    plan = Plan(Request(length=9), Request(length=3), Request(length=6), known=STALE)
    plan.settle()
    for _ in range(3):
        groups = plan.groups()
        assert {tuple(g.rows.tolist()): g.chain for g in groups} == {(0, 2): PAIR, (1,): TWIN}
        plan.profiler.known = GOOD  # the drafter is stale no more
        plan.learn(groups, {0: 2, 1: 1, 2: 2}, elapsed_ms=75.0)
    assert plan.chains() == dict.fromkeys(range(3), PAIR)


def test_a_probe_costs_what_the_cycle_took_beyond_the_prediction() -> None:
    plan = Plan(Request(), Request(), known=STALE)
    plan.groups()
    predicted = plan.planner.records[0].decision.predicted
    assert predicted is not None
    plan.learn(plan.groups(), {0: 1, 1: 1}, elapsed_ms=predicted.cycle_ms + 12.0)
    assert plan.profiler.probes == [pytest.approx(12.0)]


def test_a_probe_ends_with_its_request() -> None:
    plan = Plan(Request(length=3), Request(length=9), known=STALE)
    groups = plan.groups()
    assert len(groups) == 2
    plan.profiler.known = GOOD
    plan.requests[0].finished = True
    plan.learn(groups, {0: 1, 1: 1})
    del plan.requests[0]
    assert plan.chains() == {1: PAIR}


def test_requests_that_ask_for_something_are_not_probed() -> None:
    plan = Plan(Request(Speculation(depth=4)), known=STALE)
    [group] = plan.groups()
    assert group.chain == PAIR


# Outcomes


def test_a_regular_cycle_tells_how_the_prediction_came_out() -> None:
    plan = Plan(Request(), Request())
    groups = plan.groups()
    predicted = plan.planner.records[0].decision.predicted
    assert predicted is not None
    plan.learn(groups, {0: 3, 1: 1}, elapsed_ms=66.0)
    assert plan.profiler.cycles == [(66.0, 4, 2)]
    [(chain, _, predicted_ms, elapsed_ms, expected, gained)] = plan.profiler.outcomes
    assert (chain, elapsed_ms, gained) == (PAIR, 66.0, 2.0)
    assert predicted_ms == pytest.approx(predicted.plain_ms)
    assert expected == pytest.approx(2 * (predicted.plain_tokens - 1))


@pytest.mark.parametrize(
    "irregular",
    [
        {"is_regular": False},
        {"failures": [ModelFailure("small", RuntimeError())]},
        {"prefill": np.array([5])},
    ],
)
def test_an_irregular_cycle_counts_in_the_totals_only(irregular: dict[str, Any]) -> None:
    plan = Plan(Request())
    plan.learn(plan.groups(), {0: 2}, **irregular)
    assert len(plan.profiler.cycles) == 1
    assert not plan.profiler.outcomes


def test_groups_that_share_a_cycle_tell_of_their_tokens_only() -> None:
    plan = Plan(Request(), Request(Speculation(chain=TWIN, depth=2)), Request("off"))
    plan.learn(plan.groups(), {0: 2, 1: 2, 2: 1})
    found = {chain: (ms, gained) for chain, _, ms, _, _, gained in plan.profiler.outcomes}
    assert found == {PAIR: (0.0, 1.0), TWIN: (0.0, 1.0), ALONE: (0.0, 0.0)}


def test_a_chain_that_a_request_names_is_predicted_too() -> None:
    plan = Plan(Request(Speculation(chain=TWIN, depth=2)))
    groups = plan.groups()
    plan.learn(groups, {0: 2})
    [(chain, _, predicted_ms, *_)] = plan.profiler.outcomes
    assert chain == TWIN
    assert predicted_ms == pytest.approx(2 + 52)
    looks = plan.profiler.looks
    plan.groups()
    assert plan.profiler.looks == looks  # not anew in every cycle


# Requests that differ


def two_drafters(groups: str) -> Plan:
    plan = Plan(
        *(Request() for _ in range(4)),
        known=snapshot(
            {"small": flat(1.0), "twin": flat(1.0), "big": flat(60.0)}, {PAIR: 0.6, TWIN: 0.59}
        ),
        groups=groups,
    )
    plan.available = frozenset({"small", "twin"})
    return plan


def play(plan: Plan, cycles: int) -> list[dict[int, Chain]]:
    """Even requests are served well by the one drafter, odd ones by the other."""
    played = []
    for _ in range(cycles):
        groups = plan.groups()
        chains = {row: group.chain for group in groups for row in group.rows.tolist()}
        good = {0: PAIR, 1: TWIN}
        plan.learn(groups, {row: 4 if chains[row] == good[row % 2] else 1 for row in chains})
        for request in plan.requests.values():
            request.cycles += 1
        played.append(chains)
    return played


def test_requests_that_differ_end_up_with_a_drafter_each() -> None:
    chains = play(two_drafters("requests"), 60)
    assert {chain for cycle in chains[:4] for chain in cycle.values()} == {PAIR, TWIN}  # auditions
    assert chains[-1] == {0: PAIR, 1: TWIN, 2: PAIR, 3: TWIN}


def test_one_group_stays_one_however_requests_differ() -> None:
    for cycle in play(two_drafters("one"), 20):
        assert set(cycle.values()) == {PAIR}


def test_a_request_that_ended_is_forgotten() -> None:
    plan = two_drafters("requests")
    play(plan, 4)
    first = cast(RunningRequest, plan.requests.pop(0))
    plan.planner.forget(first)
    plan.planner.forget(first)
    assert set(plan.chains()) == {1, 2, 3}
