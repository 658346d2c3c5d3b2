"""No cycle's trees verify more nodes, or are predicted to take longer, than admission allows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from research.policies.adaserve import SPECINFER_TREE
from specrouter.cycle import Candidates, ChainGroup, DraftShape
from specrouter.profile.cycle_times import Workload, verification_ms
from specrouter.request.params import Speculation
from specrouter.request.spec import SpeculationOverride
from specrouter.routing.cycle_budget import bounded, cut_to_budget, nodes_within
from specrouter.routing.planner import Plan
from specrouter.routing.route import Route, nodes_of, route_ms
from specrouter.slo.admission import Admission
from specrouter.slo.tree_selection import CycleCost, whole
from tests.pure import few
from tests.specrouter.own_selections import FORMED, RESHAPING
from tests.specrouter.predictions import PAIR, TRIPLE
from tests.specrouter.routing.test_planner import ALONE, GOOD, Planned, Request

HOW: dict[str, dict[str, Any]] = {
    "adaptive": {},
    "adaptive, whole": {"trees": {"selection": "whole"}},
    "global-greedy": {"trees": {"selection": "global-greedy"}},
    "reshaped": {"selection": RESHAPING},
    "of one form": {"policy": "smallest", "selection": FORMED, "depth": 2, "width": 2},
    "adaserve": {"trees": {"selection": "adaserve"}},
    "specinfer": {"policy": "smallest", "trees": {"selection": "specinfer"}},
    "paper": {"policy": "paper"},
    "a chain of three": {"policy": "static", "chain": TRIPLE, "depth": 5, "width": 2},
    "spec-8": {"policy": "smallest", "depth": 8, "width": 1},
}
OVERRIDES: tuple[SpeculationOverride, ...] = (
    None,
    "off",
    Speculation(PAIR, 4, 4),
    Speculation(depth=2),
    Speculation(TRIPLE, 3),
)
budgets = st.none() | st.integers(0, 80)
times = st.none() | st.floats(1.0, 400.0)


def planned(how: str, count: int, tpot_ms: float | None = None) -> Planned:
    requests = [
        Request(override=OVERRIDES[at % len(OVERRIDES)], tpot_ms=tpot_ms) for at in range(count)
    ]
    return Planned(*requests, **HOW[how])


def within(made: Planned, nodes: int | None, ms: float | None) -> Plan:
    view = made.view()
    return made.planner.plan(view, Admission(budget_nodes=nodes, budget_ms=ms))


def route_of(group: ChainGroup) -> Route:
    return Route(group.chain, group.shape, branching=group.branching)


def verified(plan: Plan, seed: int = 0) -> int:
    """Nodes of the plan's cycle, whatever the candidates are worth."""
    draws = np.random.default_rng(seed)
    aside, open_groups = 0, list[ChainGroup]()
    for group in plan.groups:
        if group.leaves_choice:
            open_groups.append(group)
        elif len(group.chain) > 1:
            aside += len(group.rows) * (nodes_of(route_of(group)) + len(group.chain) - 2)
    if not open_groups:
        return aside
    assert plan.selector is not None
    rows = np.concatenate([group.rows for group in open_groups])
    width = 64
    depths = np.tile(np.arange(1, width + 1), (len(rows), 1))
    worth = np.sort(draws.random((len(rows), width)) ** 0.3)[:, ::-1]
    drafted = [nodes_of(Route(one.chain, one.shape)) for one in open_groups for _ in one.rows]
    worth = np.where(depths <= np.array(drafted)[:, None], worth, 0.0)
    return aside + int(plan.selector(rows, Candidates(worth, depths), aside).sum())


@pytest.mark.parametrize("how", HOW)
@settings(max_examples=few(40))
@given(nodes=budgets, ms=times, count=st.integers(1, 12), tpot_ms=st.sampled_from([None, 20.0]))
def test_no_more_nodes_are_verified_than_the_budget_has(
    how: str, nodes: int | None, ms: float | None, count: int, tpot_ms: float | None
) -> None:
    made = planned(how, count, tpot_ms)
    plan = within(made, nodes, ms)
    if nodes is not None:
        assert verified(plan) <= nodes
        assert plan.budget_nodes is None or plan.budget_nodes <= nodes
    taking = {row for group in plan.groups for row in group.rows.tolist()}
    free = {row for row in range(count) if row not in plan.standing.waited}
    assert taking >= {row for row in free if tpot_ms is None}, "nobody is left out for a budget"


@pytest.mark.parametrize("how", HOW)
@settings(max_examples=few(40))
@given(ms=st.floats(1.0, 400.0), count=st.integers(1, 12))
def test_a_cycle_that_drafts_is_predicted_to_end_in_time(how: str, ms: float, count: int) -> None:
    plan = within(planned(how, count), None, ms)
    drafting = [group for group in plan.groups if len(group.chain) > 1]
    if not drafting:
        return
    work = Workload(requests=count, slots=256)
    levels_ms = sum(
        route_ms(GOOD, Workload(requests=len(group.rows), slots=256), route_of(group))
        for group in drafting
    )
    places = np.array([count + verified(plan)])
    assert levels_ms + float(verification_ms(GOOD, work, "big", places)[0]) <= ms * 1.02 + 0.5


@pytest.mark.parametrize("how", HOW)
def test_without_budgets_or_with_wide_ones_the_plan_is_the_same(how: str) -> None:
    def groups(nodes: int | None, ms: float | None) -> list[Any]:
        plan = within(planned(how, 5), nodes, ms)
        return [(one.chain, one.shape, one.rows.tolist(), one.branching) for one in plan.groups]

    assert groups(None, None) == groups(100_000, 1e9)


@pytest.mark.parametrize("how", HOW)
def test_where_nothing_may_be_verified_the_target_decodes_alone(how: str) -> None:
    for nodes, ms in ((0, None), (None, 1e-3)):
        plan = within(planned(how, 5), nodes, ms)
        assert verified(plan) == 0
        if ms is not None or all(not one.leaves_choice for one in plan.groups):
            assert {one.chain for one in plan.groups} == {ALONE}


def test_a_fixed_form_that_is_cut_is_a_tree_of_fewer_levels() -> None:
    form = Route(PAIR, DraftShape(8, 3), branching=SPECINFER_TREE)
    assert nodes_of(form) == 20
    cut = cut_to_budget(Admission(budget_nodes=6), {form: 1}, nodes_of, lambda shares: 0.0)
    assert cut[form] == Route(PAIR, DraftShape(6, 1)), "deep before wide"


def test_a_selection_that_is_cut_keeps_parents_and_the_likeliest() -> None:
    worth = np.array([[0.9, 0.8, 0.1], [0.7, 0.6, 0.5]])
    candidates = Candidates(worth, np.array([[1, 2, 3], [1, 2, 3]]))
    select = bounded(lambda rows, those, aside: whole(those), 6)
    assert select(np.arange(2), candidates, 2).tolist() == [
        [True, True, False],
        [True, True, False],
    ]
    assert select(np.arange(2), candidates, 0).all()
    assert not select(np.arange(2), candidates, 9).any()


def budget(nodes: int | None = None, ms: float | None = None) -> Admission:
    return Admission(budget_nodes=nodes, budget_ms=ms)


def test_nodes_within_a_time_are_as_many_as_fit() -> None:
    cost = CycleCost(10.0 + np.arange(20.0), prompt_ms=5.0)
    assert nodes_within(budget(None, 18.5), cost, 99) == 3
    assert nodes_within(budget(2, 18.5), cost, 99) == 2
    assert nodes_within(budget(None, 1.0), cost, 99) == 0
    assert nodes_within(budget(), cost, 7) == 7
