"""AdaServe's shapes, with its published settings worked by hand, and its selections in plans."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from research.policies.adaserve import (
    ADASERVE,
    ADASERVE_SLO_PHASE,
    EQUAL_GREEDY,
    SPECINFER,
    SPECINFER_TREE,
    AdaServe,
    EqualGreedy,
    equal_greedy,
    needed_tokens,
    slo_customized,
)
from specrouter.config import TreesConfig
from specrouter.cycle import Candidates
from specrouter.request.params import MAX_DEPTH, MAX_WIDTH
from specrouter.slo.cycle_shape import Beside
from specrouter.slo.node_selection import GLOBAL_GREEDY, NodeSelection
from specrouter.slo.tree_planner import TreePlanner
from specrouter.slo.tree_selection import CycleCost
from tests.specrouter.predictions import PAIR
from tests.specrouter.slo.test_tree_planner import (
    CHOSEN,
    COST,
    DRAFTS,
    FREE,
    KNOWN,
    asking,
    grid,
    needing,
    paths,
    picked,
    same,
)

LLAMA = AdaServe(drafter_tokens=96, max_depth=8, min_depth=4, max_width=3)
QWEN = AdaServe(drafter_tokens=80, max_depth=5, min_depth=3, max_width=3)
# The selections of the papers, and Algorithm 2 on drafts of the shape that was decided.
PUBLISHED = (ADASERVE, ADASERVE_SLO_PHASE, EQUAL_GREEDY, SPECINFER)
AS_DECIDED = AdaServe(reshapes=False)


@pytest.mark.parametrize(
    ("machine", "budget_tokens", "requests", "shape"),
    [
        (LLAMA, 512, 1, (8, 3)),  # 511 and 96, both clipped
        (LLAMA, 512, 32, (8, 3)),  # 15 and 3
        (LLAMA, 512, 33, (8, 2)),  # 96 / 33 = 2.9
        (LLAMA, 512, 57, (7, 1)),  # 512 / 57 = 8.98
        (LLAMA, 512, 64, (7, 1)),  # 8 - 1, the published number of requests
        (LLAMA, 512, 1000, (4, 1)),  # -1 and 0, both clipped
        (QWEN, 256, 26, (5, 3)),  # 9.8 - 1 and 3.08
        (QWEN, 256, 27, (5, 2)),  # 80 / 27 = 2.96
        (QWEN, 256, 52, (3, 1)),  # 256 / 52 = 4.9
        (QWEN, 256, 80, (3, 1)),  # 3 - 1, clipped; 1: the published number of requests
    ],
)
def test_shapes_with_the_published_settings(
    machine: AdaServe, budget_tokens: int, requests: int, shape: tuple[int, int]
) -> None:
    assert machine.depth_and_width(requests, budget_tokens) == shape


@pytest.mark.parametrize(
    "bounds",
    [
        {"max_depth": 0},
        {"max_depth": MAX_DEPTH + 1},
        {"min_depth": 0},
        {"min_depth": 9},  # above max_depth
        {"max_width": 0},
        {"max_width": MAX_WIDTH + 1},
        {"max_depth": 13, "max_width": 5},
        {"drafter_tokens": 0},
        {"n_max_share": 0.0},
        {"n_max_share": math.nan},
        {"n_max_share": math.inf},
        {"latency_margin": 0.9},
        {"latency_margin": math.nan},
        {"latency_margin": math.inf},
        {"root_credit": -0.1},
        {"root_credit": 1.1},
        {"root_credit": math.nan},
    ],
)
def test_a_bound_that_no_tree_can_have_names_itself(bounds: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bounds))):
        AdaServe(**bounds)


@pytest.mark.parametrize(
    "bounds",
    [{"max_depth": 16, "max_width": 4}, {"max_width": 8}, {"max_depth": 5, "min_depth": 5}],
)
def test_a_tree_of_the_most_tokens_is_allowed(bounds: dict[str, Any]) -> None:
    trees = EqualGreedy(**bounds)
    assert trees.depth_and_width(1, 10_000) == (trees.max_depth, trees.max_width)


def planner(selection: NodeSelection, budget_tokens: int | None = None) -> TreePlanner:
    return TreePlanner(TreesConfig(budget_tokens=budget_tokens), selection)


def test_shapes_are_equations_8_and_9() -> None:
    def shape(requests: int, **settings: Any) -> tuple[int, int]:
        selection = AdaServe(max_depth=12, max_width=5, **settings)
        choice = planner(selection, 60).choose(
            KNOWN, CHOSEN, grid(), *needing(*[0.0] * requests), Beside(0)
        )
        found = choice.option
        assert found is not None
        assert choice.active.all()
        assert (found.chain, found.shape.nodes, found.plain_ms) == (PAIR, CHOSEN.shape.nodes, 0.0)
        return found.shape.depth, found.shape.width

    beside = planner(AdaServe(max_depth=12), 60).choose(
        KNOWN, CHOSEN, grid(), *needing(*[0.0] * 6), Beside(0, 14)
    )
    assert beside.option is not None
    assert beside.option.shape.depth == 60 // 20 - 1  # the budget is for all who decode
    assert shape(6) == (60 // 6 - 1, 5)
    assert shape(20) == (60 // 20 - 1, 60 // 20)
    assert shape(20, min_depth=4) == (4, 3)
    assert shape(8, c1=2) == (60 // (8 + 2) - 1, 5)
    assert shape(20, drafter_tokens=40, c2=1) == (2, 40 // 20 + 1)
    assert shape(100) == (1, 1)


def test_shapes_do_not_look_at_prompts_and_objectives() -> None:
    trees = planner(ADASERVE, 60)
    quiet = trees.choose(KNOWN, CHOSEN, grid(), *needing(*[0.0] * 4), Beside(0))
    busy = trees.choose(KNOWN, CHOSEN, grid(), *needing(0.1, np.inf, 0.0, 0.0), Beside(300))
    assert same(busy, quiet)


def test_without_a_configured_budget_shapes_follow_the_targets_curve() -> None:
    """KNOWN's pass takes 50 ms for a token and 1 ms more for each further one."""
    free = planner(AdaServe(max_depth=12, max_width=5))
    for requests in (6, 20):
        found = free.choose(KNOWN, CHOSEN, grid(), *needing(*[0.0] * requests), Beside()).option
        assert found is not None
        budget = requests + 49 + requests  # twice the time of `requests` tokens
        assert found.shape.depth == min(12, budget // requests - 1)
        assert found.shape.width == min(5, budget // requests)


def test_only_specinfers_trees_have_a_form() -> None:
    assert planner(SPECINFER).branching == SPECINFER_TREE
    assert all(planner(one).branching is None for one in (*PUBLISHED[:-1], AS_DECIDED))


@pytest.mark.parametrize("selection", [AS_DECIDED, EqualGreedy(reshapes=False), SPECINFER])
def test_drafts_that_are_not_reshaped_stay_as_they_were_decided(selection: NodeSelection) -> None:
    at = needing(0.03, np.inf, 0.0, 0.0)
    choice = planner(selection).choose(KNOWN, CHOSEN, grid(), *at, Beside(300))
    assert choice.option is CHOSEN
    assert choice.active.all()


@pytest.mark.parametrize("budget", [0, 1, 6, 14, 100])
@pytest.mark.parametrize("aside", [0, 1, 5, 200])
def test_a_budget_is_shared_equally_with_what_is_given(budget: int, aside: int) -> None:
    equal = picked(EQUAL_GREEDY, DRAFTS, FREE, budget, aside)
    assert np.array_equal(equal, equal_greedy(DRAFTS, max(0, budget - aside)))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"order": "easiest"},
        {"root_credit": 0.0},
        {"n_max_share": 0.5},
        {"latency_margin": 2.0},
        {"fills": False},
    ],
)
@pytest.mark.parametrize("aside", [0, 2, 30])
def test_adaserve_is_algorithm_2_with_its_attributes(settings: dict[str, Any], aside: int) -> None:
    tpot_ms, budget = [None, 20.0, 24.0], 9
    trees = AdaServe(**settings)
    at = asking(tpot_ms)
    found = picked(trees, DRAFTS, at, budget, aside)
    needs = needed_tokens(
        np.full(3, 100.0),
        np.full(3, 4),
        np.array(tpot_ms, dtype=np.float64),
        float(COST.ms[budget]),
        trees.latency_margin,
    )
    expected = slo_customized(
        DRAFTS,
        needs,
        max(0, budget - aside),
        round(trees.n_max_share * (3 + budget) / 3),
        8,
        trees.root_credit,
        trees.order,
        fills=trees.fills,
    )
    assert np.array_equal(found, expected)


def test_objectives_are_met_first_by_algorithm_2_and_not_by_worth() -> None:
    late = asking([None, 20.0, None])
    slo = picked(ADASERVE, DRAFTS, late, budget=3).sum(axis=1)
    greedy = picked(GLOBAL_GREEDY, DRAFTS, late, budget=3).sum(axis=1)
    assert slo[1] > greedy[1] == 0


def test_the_selector_knows_requests_by_their_rows() -> None:
    at = asking([None, 20.0, None, None], rows=[2, 3, 7, 9])
    drafts = paths(0.5, 0.5)  # of two of them, which are alike but for their objectives
    dear = CycleCost(10.0 + 2.6 * np.arange(17.0))
    selector = ADASERVE.selector(at, dear, 1)
    first = selector(np.array([7, 3]), drafts, 0).sum(axis=1).tolist()
    turned = selector(np.array([3, 7]), drafts, 0).sum(axis=1).tolist()
    assert first == turned[::-1]
    assert first[0] == 0
    assert first[1] > 0


@pytest.mark.parametrize("selection", PUBLISHED)
def test_selectors_take_drafts_without_a_node(selection: NodeSelection) -> None:
    none = np.zeros((3, 0))
    empty = Candidates(none, none.astype(np.int64))
    assert picked(selection, empty, FREE).shape == (3, 0)
