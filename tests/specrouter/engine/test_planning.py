"""What policies fail at costs speculation for some cycles; they are asked again by themselves."""

from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specrouter.cycle import ChainGroup, DraftShape
from specrouter.engine.plan_check import PlanCheck, PlanError
from specrouter.engine.planning import PLAN_CYCLES, CyclePlanning, without_waiting
from specrouter.execution.fault_guard import FaultGuard
from specrouter.routing.planner import Plan
from specrouter.slo.admission import Admission
from specrouter.view import Standing
from tests.specrouter.views import engine_view, request_view, table

NOBODY = np.zeros(0, dtype=np.int64)
PAIR = ("small", "big")


class Policy:
    """Plans the chain for all rows that decode, unless it is told to fail in some way."""

    def __init__(self) -> None:
        self.standing = Standing()
        self.fails: str | None = None
        self.leaves_out: set[int] = set()
        self.asked = 0
        self.chain: tuple[str, ...] = PAIR
        chain_policy = SimpleNamespace(decides_every_cycle=False)
        self.planner = SimpleNamespace(scheduler=SimpleNamespace(policy=chain_policy))

    def view(self, cycle: int, waiting: Any, standing: Standing) -> Any:
        if self.fails == "view":
            raise KeyError("no such row")
        seen = SimpleNamespace(with_running=lambda came: self)
        return SimpleNamespace(without=lambda preempted: seen, available=frozenset())

    def admit(self, view: Any) -> Any:
        if self.fails == "admission":
            raise ZeroDivisionError
        return Admission(admitted=(8,)) if self.fails == "senseless admission" else Admission()

    def plan(self, view: Any, admission: Admission) -> Plan:
        self.asked += 1
        if self.fails == "plan":
            raise ValueError("cannot convert float NaN to integer")
        chain = ("huge", "big") if self.fails == "senseless plan" else self.chain
        rows = np.array([row for row in (0, 1) if row not in self.leaves_out], dtype=np.int64)
        return Plan(
            groups=[ChainGroup(chain=chain, shape=DraftShape(2), rows=rows)],
            prefill_rows=NOBODY,
            prefill_counts=NOBODY,
            lasts=chain == ("big",),
        )

    def keep(self, plan: Plan) -> None:
        self.standing = Standing(waited={1: 1})


WAYS = ("view", "admission", "senseless admission", "plan", "senseless plan")


class Bench:
    def __init__(self) -> None:
        self.policy = Policy()
        self.faults = FaultGuard()
        self.number = 0
        policies: Any = SimpleNamespace(current=self.policy, admits=self.policy.admit)
        check = PlanCheck(PAIR, "big", (), prompt_tokens=16)
        self.planning = CyclePlanning(policies, self.policy.view, check, self.faults)

    def plan(self) -> Plan:
        """Of a cycle that runs by it."""
        self.number += 1
        assert self.admission(self.number) is not None
        plan = self.planning.plan(self.number, table([]), {0: 0, 1: 0}, {})
        self.planning.keep(self.number, plan)
        return plan

    def cycle(self, selection_failed: bool = False) -> bool:
        """Whether the policies plan. What they raise is counted, as by the engine."""
        self.number += 1
        plan = None
        with self.faults.part("planning"), self.planning.resting_after_failure(self.number):
            if self.admission(self.number) is not None:
                plan = self.planning.plan(self.number, table([]), {0: 0, 1: 0}, {})
                self.planning.keep(self.number, plan)
        self.planning.judge(self.number, selection_failed)
        assert plan is None or plan.groups[0].chain == PAIR
        return plan is not None

    def admission(
        self, cycle: int, waiting: Any = MappingProxyType({}), running: Any = ()
    ) -> Admission | None:
        with self.planning.resting_after_failure(cycle):
            return self.planning.admission(cycle, waiting, running)

    def cycles(self, count: int) -> str:
        return "".join("d" if self.cycle() else "-" for _ in range(count))


@pytest.mark.parametrize("way", WAYS)
def test_who_keeps_failing_is_asked_less_and_less_often(way: str) -> None:
    bench = Bench()
    assert bench.cycles(2) == "dd"
    bench.policy.fails = way
    assert bench.cycles(4 + 8 + 16 + 32) == "-" * 60
    assert bench.policy.standing == Standing(), "what stood is forgotten"
    assert bench.faults.counts["planning"] == 4
    bench.policy.fails = None
    assert bench.cycles(1) == "d"
    bench.policy.fails = way
    assert bench.cycles(1) == "-"
    bench.policy.fails = None
    assert bench.cycles(5) == "---dd", "who did well begins anew"


def test_a_failed_selection_rests_the_policies_and_is_counted_by_the_executor() -> None:
    bench = Bench()
    assert bench.cycle(selection_failed=True)
    assert not bench.cycle(selection_failed=True), "it rests, and this was no plan of its own"
    assert bench.cycles(4) == "--dd"
    for _ in range(2):
        bench.cycle(selection_failed=True)
        bench.cycles(3)
    assert bench.cycles(1) == "-", "the second rest in a row is of 8 cycles"


def test_a_request_that_is_left_out_for_ever_is_served_by_the_target() -> None:
    bench = Bench()
    bench.policy.leaves_out = {1}
    served = [bench.cycles(1) for _ in range(140)]
    assert served[:128] == ["d"] * 128
    assert "-" in served[128:]


def test_requests_that_nobody_admits_while_nothing_runs_are_admitted_in_order() -> None:
    bench = Bench()
    waiting: Any = {8: SimpleNamespace()}
    for cycle in range(1, 200):  # one that runs may make room for it
        assert bench.admission(cycle, waiting, (3,)) == Admission()
    for cycle in range(200, 328):
        assert bench.admission(cycle, waiting) == Admission()
    with pytest.raises(PlanError, match="nothing has run"):
        bench.admission(328, waiting)
    assert bench.admission(329, waiting) is None, "the engine admits by itself"


def test_policies_that_rest_decide_nothing() -> None:
    bench = Bench()
    assert bench.admission(1) == Admission()
    bench.policy.fails = "admission"
    with pytest.raises(ZeroDivisionError):
        bench.admission(2)
    assert bench.admission(3) is None


def test_a_cycle_is_not_planned_by_the_view_of_an_earlier_one() -> None:
    bench = Bench()
    assert bench.admission(1) is not None
    with pytest.raises(AssertionError):
        bench.planning.plan(2, table([]), {0: 0, 1: 0}, {})
    assert bench.policy.asked == 0


@pytest.mark.parametrize(
    ("chunks", "waits", "expected"),
    [
        ({10: 36, 11: 240}, {1: 0}, {10: 240}),  # as fast as the one that waits for it was to read
        ({10: 240, 11: 36}, {1: 0}, {10: 240}),
        ({10: 36, 11: 240, 12: 300}, {1: 0, 2: 0}, {10: 256}),  # and no more than it has left
        ({10: 36, 11: 20, 12: 300}, {1: 0, 2: 1}, {10: 36}),
        ({11: 240}, {1: 0}, {11: 240}),  # nobody is to read it
        ({10: 36, 13: 5}, {3: 0}, {10: 36, 13: 5}),  # it decodes
    ],
)
def test_whoever_is_waited_for_reads_as_much_as_those_who_wait(
    chunks: dict[int, int], waits: dict[int, int], expected: dict[int, int]
) -> None:
    left = (256, 300, 400, 0)
    rows = [request_view(10 + row, row=row, unread=each) for row, each in enumerate(left)]
    view = engine_view(rows)
    assert without_waiting(Admission(chunks=chunks), view, waits).chunks == expected


def test_a_plan_without_models_that_draft_is_good_for_some_cycles_of_the_same_rows() -> None:
    bench = Bench()
    bench.policy.chain = ("big",)
    assert bench.planning.again(1, (0, 1)) is None, "nothing is planned yet"
    planned = bench.plan()
    first = bench.number
    for cycle in range(first + 1, first + PLAN_CYCLES):
        again = bench.planning.again(cycle, (0, 1))
        assert again is not None
        assert (again.rows, again.records) == (planned.rows, ())
        assert bench.planning.again(cycle, (0,)) is None, "another one has gone"
    assert bench.planning.again(first + PLAN_CYCLES, (0, 1)) is None
    bench.planning.forget()
    assert bench.planning.again(first + 1, (0, 1)) is None


@pytest.mark.parametrize("why", ["a model drafts", "the policy decides in every cycle"])
def test_other_plans_are_of_a_single_cycle(why: str) -> None:
    bench = Bench()
    if why == "a model drafts":
        bench.policy.chain = PAIR
    else:
        bench.policy.chain = ("big",)
        bench.policy.planner.scheduler.policy.decides_every_cycle = True
    bench.plan()
    assert bench.planning.again(bench.number + 1, (0, 1)) is None
