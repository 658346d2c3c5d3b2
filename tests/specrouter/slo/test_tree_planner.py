"""What one cycle does, by configuration, and selectors that know its requests and its costs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specrouter.config import SchedulerConfig, TreesConfig
from specrouter.cycle import Candidates, DraftShape, Option
from specrouter.profile.cycle_times import Workload
from specrouter.profile.prediction import OptionGrid, ShapeLimits
from specrouter.request.params import MAX_TREE_TOKENS
from specrouter.slo.cycle_shape import LONGEST_WAIT, Beside, CycleChoice, choose_cycle
from specrouter.slo.node_selection import GLOBAL_GREEDY, GOODPUT, WHOLE, NodeSelection
from specrouter.slo.tree_planner import TreePlanner, cycle_cost, selection_of
from specrouter.slo.tree_selection import CycleCost, global_greedy, whole
from specrouter.view import RequestTable
from tests.specrouter.own_selections import FORMED, RESHAPING, UNPLANNED
from tests.specrouter.predictions import PAIR, flat, rising, snapshot
from tests.specrouter.views import request_view, table

Floats = NDArray[np.float64]
NAN = np.nan
COST = CycleCost(10.0 + 0.25 * np.arange(193.0))
KNOWN = snapshot({"small": flat(0.5), "big": rising(50.0)}, {PAIR: 0.8})


def planner(
    selection: NodeSelection = GOODPUT, only_paths: bool = False, **settings: Any
) -> TreePlanner:
    return TreePlanner(TreesConfig.model_validate(settings), selection, only_paths)


def asking(tpot_ms: Sequence[float | None], rows: Sequence[int] | None = None) -> RequestTable:
    """Requests with these objectives that won 4 tokens in 100 ms."""
    numbers = range(len(tpot_ms)) if rows is None else rows
    return table(
        [
            request_view(row, row=row, decode_ms=100.0, decoded=4, tpot_ms=tpot)
            for row, tpot in zip(numbers, tpot_ms, strict=True)
        ]
    )


def needing(*rates: float) -> tuple[Floats, NDArray[np.int64]]:
    """So many tokens per millisecond, of requests that have not sat out."""
    return np.array(rates), np.zeros(len(rates), dtype=np.int64)


def paths(*alphas: float, nodes: int = 8) -> Candidates:
    """Each a path whose nodes are accepted with chance alpha."""
    worth = np.array(alphas)[:, None] ** np.arange(1.0, nodes + 1)
    return Candidates(worth, np.broadcast_to(np.arange(1, nodes + 1), worth.shape))


def grid(requests: int = 4, **limits: Any) -> OptionGrid:
    return OptionGrid(PAIR, KNOWN, Workload(requests=requests), ShapeLimits(**limits))


CHOSEN = Option(chain=PAIR, shape=DraftShape(5, 2, 4), cycle_ms=60.0, tokens=3.0, plain_ms=58.0)
ALONE = Option(chain=("big",), cycle_ms=25.0)
# All selections but goodput, the only one that plans cycles.
OTHERS = (GLOBAL_GREEDY, WHOLE, UNPLANNED, FORMED, RESHAPING)
# Sixteen requests, for all of which drafts do not pay, and four that would be late without.
DEAR = snapshot({"small": flat(0.1), "big": rising(10.0)}, {PAIR: 0.5})
SLOW = OptionGrid(PAIR, DEAR, Workload(requests=16), ShapeLimits())
HURRY = [1.1 / 25.0] * 4 + [0.001] * 12


def same(first: CycleChoice, second: CycleChoice) -> bool:
    return first.option == second.option and np.array_equal(first.active, second.active)


@pytest.mark.parametrize("selection", [one for one in OTHERS if one is not RESHAPING])
def test_without_plans_for_cycles_drafts_stay_as_they_were_decided(
    selection: NodeSelection,
) -> None:
    at = needing(0.03, np.inf, 0.0, 0.0)
    choice = planner(selection).choose(KNOWN, CHOSEN, grid(), *at, Beside(300))
    assert choice.option is CHOSEN
    assert choice.active.all()


@pytest.mark.parametrize("selection", [GOODPUT, *OTHERS])
def test_a_target_alone_without_objectives_has_no_trees_to_shape(selection: NodeSelection) -> None:
    for prompt_tokens in (0, 300):
        choice = planner(selection).choose(
            KNOWN, ALONE, grid(), *needing(0.0, 0.0, 0.0, 0.0), Beside(prompt_tokens)
        )
        assert choice.option is None
        assert choice.active.all()


@pytest.mark.parametrize("others", [0, 7])
@pytest.mark.parametrize(
    ("rates", "prompt_tokens"), [(HURRY, 0), (HURRY, 40), ([0.01] * 16, 0), ([np.inf] * 16, 0)]
)
def test_goodput_takes_the_best_cycle(rates: list[float], prompt_tokens: int, others: int) -> None:
    at = np.array(rates), np.array([0] * 15 + [LONGEST_WAIT])
    found = planner().choose(DEAR, CHOSEN, SLOW, *at, Beside(prompt_tokens, others))
    best = choose_cycle(DEAR, SLOW, *at, Beside(prompt_tokens, others))
    assert same(found, best)
    # The chain that was not decided on is looked at too.
    assert same(planner().choose(DEAR, ALONE, SLOW, *at, Beside(prompt_tokens, others)), best)


def test_a_selection_that_reshapes_says_how_large_drafts_are() -> None:
    """By all that decode and the budget; the chain and its number of nodes stay."""
    at = needing(0.1, np.inf, 0.0, 0.0)
    for budget_tokens, beside, depth in ((None, 0, 4), (None, 3, 7), (9, 3, 9)):
        trees = planner(RESHAPING, budget_tokens=budget_tokens)
        choice = trees.choose(KNOWN, CHOSEN, grid(), *at, Beside(300, beside))
        shape = DraftShape(depth, 3, CHOSEN.shape.nodes)
        assert choice.option == replace(CHOSEN, shape=shape, plain_ms=0.0)
        assert choice.active.all()


def test_where_only_paths_are_exact_no_shape_is_wider() -> None:
    strict = planner(RESHAPING, only_paths=True)
    path = replace(CHOSEN, shape=DraftShape(5, 1, 4))
    found = strict.choose(KNOWN, path, grid(), *needing(0.0, 0.0, 0.0, 0.0), Beside(0)).option
    assert found is not None
    assert (found.shape.depth, found.shape.width) == (4, 1)
    assert planner(FORMED, only_paths=True).branching is None


def test_trees_have_a_form_where_the_selection_has_one() -> None:
    assert planner(FORMED).branching == (2, 1)
    others = (one for one in (GOODPUT, *OTHERS) if one is not FORMED)
    assert all(planner(one).branching is None for one in others)


def test_a_cycle_costs_its_levels_and_the_targets_pass_over_roots_prompts_and_nodes() -> None:
    known = snapshot({"big": rising(10.0)}, stages={"verify": rising(1.0, 0.1), "cycle": flat(2.0)})
    cost = cycle_cost(known, Workload(requests=3), "big", 5.0, 7, 2.0)
    # 10 tokens without nodes cost 19 ms, of which 3 are judged.
    assert cost.whole_ms(0) == pytest.approx(5.0 + 2.0 * (19.0 + 1.2 + 2.0))
    assert cost.prompt_ms == pytest.approx(2.0 * 7.0)
    assert cost.plain_ms == pytest.approx(2.0 * (12.0 + 1.2 + 2.0))
    assert np.diff(cost.ms) == pytest.approx(np.full(len(cost.ms) - 1, 2.0 * 1.1))
    assert len(cost.ms) == 3 * MAX_TREE_TOKENS + 1, "no constant but a tree's bounds a cycle"


def test_where_passes_are_filled_up_nodes_cost_what_their_pass_does() -> None:
    stairs = replace(rising(10.0), sizes=(1, 2, 4, 8, 16, 32))
    cost = cycle_cost(snapshot({"big": stairs}), Workload(requests=3), "big", 5.0, 2, 1.0)
    assert cost.filled is not None
    # 3 roots and 2 tokens of prompts: 3 nodes fill 8 tokens, 11 fill 16, 27 fill 32.
    assert cost.filled[:12].tolist() == [3] * 4 + [11] * 8
    assert cost.filled[27:30].tolist() == [27, 28, 29]
    assert len(set((cost.ms[:12] - cost.ms[0]).tolist())) == 2
    assert len(cost.filled) == len(cost.ms)
    assert (
        cycle_cost(snapshot({"big": rising(10.0)}), Workload(requests=3), "big", 5.0, 2, 1.0).filled
        is None
    )


def picked(
    selection: NodeSelection,
    candidates: Candidates,
    at: RequestTable,
    budget: int = 6,
    aside: int = 0,
) -> NDArray[np.bool_]:
    return selection.selector(at, COST, budget)(at.row, candidates, aside)


DRAFTS = paths(0.9, 0.5, 0.7)
FREE = asking([None] * 3)


def test_whole_trees_are_everything_that_was_drafted() -> None:
    assert np.array_equal(picked(WHOLE, DRAFTS, FREE, budget=0), whole(DRAFTS))


@pytest.mark.parametrize("budget", [0, 1, 6, 14, 100])
@pytest.mark.parametrize("aside", [0, 1, 5, 200])
def test_a_budget_is_shared_by_worth_with_what_is_given(budget: int, aside: int) -> None:
    best = picked(GLOBAL_GREEDY, DRAFTS, FREE, budget, aside)
    assert np.array_equal(best, global_greedy(DRAFTS, max(0, budget - aside)))


def test_a_selector_knows_requests_by_their_rows() -> None:
    at = asking([2000.0, 10.0, 2000.0, 2000.0], rows=[2, 3, 7, 9])
    drafts = paths(0.5, 0.5)  # of two of them, which are alike but for their objectives
    dear = CycleCost(10.0 + 2.6 * np.arange(17.0))  # for throughput, nodes do not pay
    selector = GOODPUT.selector(at, dear, 1)
    first = selector(np.array([7, 3]), drafts, 0).sum(axis=1).tolist()
    turned = selector(np.array([3, 7]), drafts, 0).sum(axis=1).tolist()
    assert first == turned[::-1]
    assert first[0] == 0
    assert first[1] > 0


@pytest.mark.parametrize(
    ("settings", "selection"),
    [
        ({}, GOODPUT),
        ({"nodes": 5}, GLOBAL_GREEDY),
        ({"policy": "target-only"}, WHOLE),
        ({"policy": "static", "chain": PAIR}, WHOLE),
        ({"policy": "static", "chain": PAIR, "nodes": 3}, GLOBAL_GREEDY),
        ({"policy": "smallest"}, WHOLE),
    ],
)
def test_policies_that_fix_their_trees_verify_them(
    settings: dict[str, Any], selection: NodeSelection
) -> None:
    scheduler = SchedulerConfig.model_validate(settings)
    assert selection_of(TreesConfig(), scheduler) is selection
    assert selection_of(TreesConfig(selection="goodput"), scheduler) is GOODPUT
    assert selection_of(TreesConfig(selection="whole"), scheduler) is WHOLE
