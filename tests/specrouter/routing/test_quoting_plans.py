"""Plans let a drafter without weights quote, and choose among its nodes only if it does."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specrouter.config import SchedulerConfig, TreesConfig
from specrouter.cycle import Candidates
from specrouter.request.params import Chain
from specrouter.routing.planner import Plan, Planner
from specrouter.routing.scheduler import ModelChainScheduler
from specrouter.slo.admission import Admission
from specrouter.slo.tree_planner import TreePlanner, selection_of
from tests.specrouter.predictions import ALL, NAMES, PARAMETERS, snapshot
from tests.specrouter.routing.test_planner import TIMES
from tests.specrouter.views import engine_view, request_view

SIZES = {"suffix": 0, **PARAMETERS}


def plan(alpha: float, trees: TreesConfig | None = None, **settings: Any) -> Plan:
    """Of one request; `alpha`: of all chains."""
    names = ("suffix", *NAMES)
    pairs: dict[Chain, float] = {(one, "big"): alpha for one in names[:-1]}
    config = SchedulerConfig(policy="adaptive", **settings)
    known = replace(snapshot(TIMES, pairs), parameters=SIZES)
    trees = trees or TreesConfig()
    planner = Planner(
        ModelChainScheduler(config, names, SIZES, "big", quoters=("suffix",)),
        TreePlanner(trees, selection_of(trees, config)),
        256,
    )
    running = (request_view(1, row=0),)
    view = engine_view(running=running, available=ALL | {"suffix"}, performance=known)
    return planner.plan(view, Admission())


def test_where_nothing_pays_but_quotations_they_are_selected_when_they_come() -> None:
    found = plan(0.02)
    [group] = found.groups
    assert group.chain == ("big",)
    assert (group.quotes, group.leaves_choice) == ("suffix", True)
    assert found.selector is not None
    assert found.budget_nodes is None
    assert group.requests == 1
    assert group.quoted_ms is not None
    assert (np.diff(group.quoted_ms) >= 0).all()
    assert found.lasts
    depths = np.arange(1, 9)[None]
    candidates = Candidates(np.power(0.99, depths).astype(np.float64), depths)
    assert found.selector(group.rows, candidates, 0).sum() == 8
    candidates = Candidates(np.power(0.01, depths).astype(np.float64), depths)
    assert found.selector(group.rows, candidates, 0).sum() == 0


def test_beside_a_chain_quotations_may_take_its_place() -> None:
    [group] = plan(0.8).groups
    assert len(group.chain) > 1
    assert "suffix" not in group.chain, "it stands in no chain that is chosen"
    assert group.quotes == "suffix"
    assert group.quoted_ms is None, "a selector picks among all drafts"


@pytest.mark.parametrize(
    "settings",
    [{"depth": 3}, {"trees": TreesConfig(selection="whole")}],
    ids=["a configured depth", "whole trees"],
)
def test_who_says_how_much_is_drafted_gets_that(settings: dict[str, Any]) -> None:
    found = plan(0.02, **settings)
    [group] = found.groups
    assert group.quotes is None
    assert found.selector is None
