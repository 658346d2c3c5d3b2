"""Plans of the published policies: what they make of requests, cycle by cycle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from research.policies.adaserve import (
    ADASERVE,
    ADASERVE_SLO_PHASE,
    EQUAL_GREEDY,
    SPECINFER,
    AdaServe,
)
from research.policies.flowguard_printed import FLOWGUARD_PRINTED
from research.policies.paper import PAPER
from research.policies.specustream import SPECUSTREAM, SPECUSTREAM_FIXED
from specrouter.config.policies import CHAIN_POLICIES, NODE_SELECTIONS, REPLICA_POLICIES
from specrouter.cycle import DraftShape
from specrouter.profile.cycle_times import Workload
from specrouter.request.spec import SpeculationOverride
from specrouter.slo.node_selection import NodeSelection
from tests.specrouter.cluster.states import state, view
from tests.specrouter.cluster.test_policy import burst, ranked
from tests.specrouter.predictions import PAIR
from tests.specrouter.routing.test_planner import CHEAP, Planned, Request, pairs


@pytest.mark.parametrize(
    ("registry", "name", "policy"),
    [
        (REPLICA_POLICIES, "flowguard-printed", FLOWGUARD_PRINTED),
        (CHAIN_POLICIES, "paper", PAPER),
        (CHAIN_POLICIES, "specustream", SPECUSTREAM),
        (CHAIN_POLICIES, "specustream-fixed", SPECUSTREAM_FIXED),
        (NODE_SELECTIONS, "adaserve", ADASERVE),
        (NODE_SELECTIONS, "adaserve-slo-phase", ADASERVE_SLO_PHASE),
        (NODE_SELECTIONS, "equal-greedy", EQUAL_GREEDY),
        (NODE_SELECTIONS, "specinfer", SPECINFER),
    ],
)
def test_a_configuration_names_it_by_a_short_name_and_by_where_it_is(
    registry: Any, name: str, policy: object
) -> None:
    address = f"research.policies:{name.replace('-', '_').upper()}"
    assert registry.find(name) is registry.find(address) is policy


def test_adaserves_shapes_are_predicted_as_they_are_drafted() -> None:
    trees = {"selection": "adaserve", "budget_tokens": 8}
    plan = pairs(*(Request() for _ in range(4)), trees=trees)
    [group] = plan.groups()
    assert (group.shape.depth, group.shape.width) == (1, 2)
    asked = plan.scheduler.predict(CHEAP, Workload(requests=4), PAIR, DraftShape(1, 2), whole=False)
    assert group.predicted == asked


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


@pytest.mark.parametrize(
    ("speculation", "selection"), [("off", ADASERVE), ("off", EQUAL_GREEDY), (None, SPECINFER)]
)
def test_whole_trees_need_no_selector(
    speculation: SpeculationOverride, selection: NodeSelection
) -> None:
    plan = pairs(Request(override=speculation), selection=selection)
    assert all(group.whole for group in plan.groups())
    assert plan.selector is None


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


def test_what_was_sent_since_a_replica_told_its_state_is_not_seen() -> None:
    """Of 8 requests at once, metrics of 500 ms ago send all to one."""
    assert burst("flowguard-printed") == {"a": 8, "b": 0}


def test_the_queue_alone_is_read_at_each_choice() -> None:
    told = state()
    views = [view("a", state(4), reported=told), view("b", state(), reported=told)]
    assert ranked("flowguard-printed", views).order == ("a", "b"), "running ones are not seen"
    views = [view("a", state(0, 4), reported=told), view("b", state(), reported=told)]
    assert ranked("flowguard-printed", views).order == ("b", "a")
