"""Plans of the published policies: what they make of requests, cycle by cycle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from research.policies.adaserve import ADASERVE, EQUAL_GREEDY, SPECINFER, AdaServe
from specrouter.cycle import DraftShape
from specrouter.profile.cycle_times import Workload
from specrouter.request.spec import SpeculationOverride
from specrouter.slo.admission import Admission
from specrouter.slo.node_selection import NodeSelection
from tests.specrouter.predictions import PAIR, flat, snapshot
from tests.specrouter.routing.test_planner import (
    CHEAP,
    EVERYONE,
    TWIN,
    Planned,
    Prefill,
    Request,
    of,
    pairs,
    queue,
    taking_part,
)

# SpecRouter's paper


def test_the_papers_policy_rejects_hard() -> None:
    times = {"small": flat(1.0), "big": flat(100.0)}
    plan = Planned(
        Request(), known=snapshot(times, similarity={PAIR: 0.99}), policy="paper", depth=2
    )
    plan.available = frozenset({"small"})
    [group] = plan.groups()
    assert (group.chain, group.hard_rejection, group.whole) == (PAIR, True, True)
    assert plan.selector is None


@pytest.mark.parametrize("selection", ["adaserve", "goodput", "global-greedy"])
def test_the_papers_policy_verifies_whole_trees_whatever_is_selected(selection: str) -> None:
    times = {"small": flat(1.0), "big": flat(100.0)}
    known = snapshot(times, similarity={PAIR: 0.99})
    trees = {"selection": selection}
    plan = pairs(Request(), known=known, policy="paper", depth=2, trees=trees)
    [group] = plan.groups()
    assert (group.chain, group.hard_rejection, group.whole) == (PAIR, True, True)
    assert plan.selector is None


# AdaServe


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        (4, (7, 3)),  # 32 // 4 - 1, 32 // 4 but at most 3
        (8, (3, 3)),
        (16, (1, 2)),
    ],
)
def test_adaserves_shapes_go_by_the_number_of_requests(
    requests: int, expected: tuple[int, int]
) -> None:
    many = [Request() for _ in range(requests)]
    trees = {"selection": "adaserve", "budget_tokens": 32}
    plan = pairs(*many, trees=trees, policy="static", chain=PAIR)
    [group] = plan.groups()
    assert (group.shape.depth, group.shape.width) == expected


def test_adaserves_shapes_are_predicted_as_they_are_drafted() -> None:
    trees = {"selection": "adaserve", "budget_tokens": 8}
    plan = pairs(*(Request() for _ in range(4)), trees=trees)
    [group] = plan.groups()
    assert (group.shape.depth, group.shape.width) == (1, 2)
    asked = plan.scheduler.predict(CHEAP, Workload(4), PAIR, DraftShape(1, 2), whole=False)
    plan.learn([group], dict.fromkeys(range(4), 2))
    [(chain, requests, predicted_ms, _, expected, *_)] = plan.profiler.outcomes
    assert (chain, requests) == (PAIR, 4)
    assert predicted_ms == pytest.approx(asked.plain_ms)
    assert expected == pytest.approx(4 * (asked.plain_tokens - 1))


def test_adaserves_shapes_do_not_look_at_the_prompts_that_are_read() -> None:
    plan = pairs(*(Request() for _ in range(4)), selection=ADASERVE)
    [quiet] = plan.groups()
    plan.prefill = Prefill(tokens=200)
    [reading] = plan.groups()
    assert of(reading) == of(quiet)


def test_what_objectives_need_is_judged_by_a_cycle_that_spends_the_whole_budget() -> None:
    selection = AdaServe(reshapes=False, n_max_share=100.0)

    def nodes_of_the_needy(budget_nodes: int) -> int:
        requests = [Request(tpot_ms=250.0, decoded=1), *(Request() for _ in range(7))]
        fixed: dict[str, Any] = {"policy": "static", "chain": PAIR, "depth": 16, "width": 4}
        trees = {"budget_tokens": 8 + budget_nodes}
        plan = pairs(*requests, trees=trees, selection=selection, **fixed)
        plan.now_s = 0.25
        plan.groups()
        # Nothing but its objective gives it a node: all others' are worth more.
        worth = np.full((8, 64), 0.5)
        worth[0] = 0.05
        return plan.selected(worth, np.arange(8))[0]

    # With 192 nodes a cycle takes about 260 ms, with 400 of them 470, in which it needs 0.85 tokens
    # more, which are 17 nodes.
    few, many = nodes_of_the_needy(192), nodes_of_the_needy(400)
    assert 0 < few < 5
    assert many - few == pytest.approx(17, abs=2)


def test_a_large_batch_with_a_large_budget_can_be_planned() -> None:
    for selection in (ADASERVE, AdaServe(reshapes=False)):
        requests = (Request(tpot_ms=40.0) for _ in range(64))
        fixed: dict[str, Any] = {"selection": selection, "policy": "static", "chain": PAIR}
        plan = Planned(*requests, known=CHEAP, trees={"budget_tokens": 1024}, **fixed)
        plan.settle()
        found = plan.plan()
        assert found.budget_nodes == 1024 - 64
        assert sorted(found.rows) == list(range(64))


@pytest.mark.parametrize("selection", [ADASERVE, AdaServe(reshapes=False), EQUAL_GREEDY, SPECINFER])
def test_no_request_sits_out(selection: NodeSelection) -> None:
    plan = queue(selection=selection)
    assert [taking_part(plan) for _ in range(4)] == [EVERYONE] * 4


@pytest.mark.parametrize(
    ("speculation", "selection"),
    [("off", ADASERVE), ("off", EQUAL_GREEDY), (None, SPECINFER)],
)
def test_whole_trees_need_no_selector(
    speculation: SpeculationOverride, selection: NodeSelection
) -> None:
    plan = pairs(Request(speculation), selection=selection)
    assert all(group.whole for group in plan.groups())
    assert plan.selector is None


# SpecuStream


def test_each_request_drafts_as_deep_as_its_own_flow_says() -> None:
    """At 2 tokens a second depths are bounded by the base and the most only."""
    fast, slow = (
        Request(drafts=1, acceptance=rate, decoded=1, came_s=-1.0) for rate in (1.0, 0.01)
    )
    plan = Planned(fast, slow, policy="specustream")
    found = {tuple(group.rows.tolist()): group for group in plan.groups()}
    assert {rows: group.shape.depth for rows, group in found.items()} == {(0,): 15, (1,): 5}
    assert all(group.chain == PAIR and group.whole for group in found.values())
    assert plan.standing.memories[fast.id].vector[0] == 1.0
    fast.drafts, fast.acceptance = 2, 0.0
    [group] = plan.groups()
    assert group.shape.depth == 5, "nothing of the last draft was accepted"
    assert plan.standing.memories[fast.id].updates == 2


def test_micro_batches_take_turns() -> None:
    requests = [Request() for _ in range(40)]
    plan = Planned(*requests, policy="specustream")
    for _ in range(20):
        [group] = plan.groups()
        assert len(group.rows) == 16, "80 tokens of depth 5"
        assert max(plan.standing.waited.values()) <= 2, "of 40 requests"


def test_admission_and_configuration_may_allow_fewer_levels() -> None:
    request = Request(drafts=1, acceptance=1.0, decoded=1, came_s=-1.0)
    [group] = Planned(request, policy="specustream", depth=3).groups()
    assert group.shape.depth == 3
    plan = Planned(request, policy="specustream-fixed", chain=TWIN)
    [group] = plan.planner.plan(plan.view(), Admission((), {}, depths={request.id: 2})).groups
    assert (group.chain, group.shape.depth) == (TWIN, 2)
