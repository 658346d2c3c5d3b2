"""Policies take turns; what each of them decided before is decided anew."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from specrouter.config import EngineConfig, SchedulerConfig, TreesConfig
from specrouter.cycle import DraftShape
from specrouter.engine.policies import PoliciesInUse
from specrouter.routing.decision_record import DecisionRecord
from specrouter.routing.decisions import INTERVAL
from specrouter.routing.planner import Plan
from specrouter.view import SCHEDULED, ChainDecision, InUse, Standing
from tests.specrouter.slo.test_admission import request, view

NOBODY = np.zeros(0, dtype=np.int64)
PARAMETERS = {"small": 1, "big": 10}
ADAPTIVE = SchedulerConfig(), TreesConfig()
ALONE = SchedulerConfig(policy="target-only"), TreesConfig()


def in_use(engine: EngineConfig | None = None) -> PoliciesInUse:
    pool: Any = SimpleNamespace(
        names=tuple(PARAMETERS), target="big", quoters=(), fit_together=lambda names: True
    )
    return PoliciesInUse(engine or EngineConfig(), pool, PARAMETERS, ADAPTIVE)


def plan_of(cycle: int) -> Plan:
    decision = ChainDecision(chain=("small", "big"), shape=DraftShape(4))
    standing = Standing({SCHEDULED: InUse(decision, 1, 0, cycle, cycle)}, evaluated_at=cycle)
    return Plan(
        groups=[],
        prefill_rows=NOBODY,
        prefill_counts=NOBODY,
        standing=standing,
        records=(DecisionRecord(cycle=cycle, unix_s=0.0, requests=1, decision=decision),),
    )


def test_branches_are_left_out_where_that_is_asked() -> None:
    for engine, width in ((EngineConfig(), 4), (EngineConfig(exact="strict"), 1)):
        assert in_use(engine).current.planner.scheduler.limits((4, 4)).width == width


def test_a_plan_that_is_run_leaves_its_standing_and_records_with_their_time() -> None:
    policy = in_use().current
    policy.keep(plan_of(5))
    assert policy.standing.evaluated_at == 5
    [record] = policy.records
    assert record.cycle == 5
    assert record.unix_s > 1.7e9


def test_records_are_those_of_the_last_256_switches() -> None:
    policy = in_use().current
    for cycle in range(300):
        policy.keep(plan_of(cycle))
    assert [policy.records[0].cycle, policy.records[-1].cycle] == [44, 299]


def test_a_policy_that_is_used_again_has_its_records_and_decides_anew() -> None:
    policies = in_use()
    first = policies.current
    first.keep(plan_of(100))
    policies.use(ADAPTIVE)
    assert policies.current is first
    assert first.standing == plan_of(100).standing, "nothing happens where it is in use"
    policies.use(ALONE)
    assert policies.current is not first
    assert not policies.current.records
    policies.use(ADAPTIVE)
    assert policies.current is first
    assert len(first.records) == 1
    assert first.standing.in_use[SCHEDULED].cycle == 100 - INTERVAL


def test_trees_of_one_form_give_the_chain_its_shape() -> None:
    policies = in_use()
    trees = TreesConfig(selection="tests.specrouter.own_selections:FORMED")
    policies.use((SchedulerConfig(policy="static", chain=("small", "big")), trees))
    limits = policies.current.planner.scheduler.limits(SCHEDULED)
    assert (limits.depth, limits.width) == (2, 2)


def test_admission_is_the_policys_that_is_named_and_else_the_configured_one() -> None:
    policies = in_use(EngineConfig(admission="fcfs"))
    seen = view([request(1, left=9)], [])
    assert (policies.admission, policies.preempts) == ("fcfs", False)
    assert policies.admits(seen).admitted == (1,)
    policies.use(ADAPTIVE, "slo")
    assert (policies.admission, policies.preempts) == ("slo", True)
    policies.use(ADAPTIVE, "tests.specrouter.own_admission:NOBODY")
    assert policies.admission == "tests.specrouter.own_admission:NOBODY"
    assert not policies.preempts
    assert policies.admits(seen).admitted == ()
    policies.use(ADAPTIVE)
    assert policies.admission == "fcfs"
    assert policies.admits(seen).admitted == (1,)
