"""The default's selection: both phases under the budget that is worth most."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specrouter.cycle import Candidates
from specrouter.slo.tree_selection import CycleCost, most_valuable
from specrouter.slo.value import value
from tests.pure import few
from tests.specrouter.optimal_trees import ROOT, Forest, random_forest
from tests.specrouter.slo.test_tree_planner import paths

Floats = NDArray[np.float64]
SEEDS = st.integers(0, 10_000)
RATES = (0.0, 0.02, 0.05, 0.1, 0.2, np.inf)
STEPS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)  # tokens of filled passes


def cost(most: int = 400, first_ms: float = 20.0, each_ms: float = 0.5) -> CycleCost:
    return CycleCost(first_ms + each_ms * np.arange(most + 1.0), drafting_ms=2.0)


def rates_of(seed: int, count: int) -> Floats:
    return np.random.default_rng(seed).choice(RATES, count)


def worth_of(
    candidates: Candidates, chosen: NDArray[np.bool_], rates: Floats, cost: CycleCost
) -> float:
    tokens = 1.0 + (candidates.worth * chosen).sum(axis=1)
    finite = np.where(np.isinf(rates), 0.0, rates)
    return float(value(tokens, finite, np.array(cost.ms[chosen.sum()])).sum())


def forest(seed: int) -> Forest:
    return random_forest(np.random.default_rng(seed), 4, 12)


@settings(max_examples=few(150))
@given(seed=SEEDS, most=st.integers(0, 30))
def test_budgets_are_strict_and_parents_come_with_their_children(seed: int, most: int) -> None:
    case = forest(seed)
    chosen = most_valuable(case.candidates, rates_of(seed, len(case.parents)), cost(most))
    assert chosen.sum() <= most
    for row, parents in enumerate(case.parents):
        for node in np.flatnonzero(chosen[row]):
            assert parents[node] == ROOT or chosen[row, parents[node]]
            assert case.candidates.worth[row, node] > 0.0


@settings(max_examples=few(100))
@given(seed=SEEDS, most=st.integers(0, 20), more=st.integers(1, 20))
def test_a_larger_budget_is_never_worth_less(seed: int, most: int, more: int) -> None:
    """Small enough that all budgets are compared."""
    case, rates = forest(seed), np.full(4, 0.1)[: len(forest(seed).parents)]
    small, large = cost(min(most, 22)), cost(min(most + more, 22))
    found = [most_valuable(case.candidates, rates, each) for each in (small, large)]
    assert worth_of(case.candidates, found[1], rates, large) >= (
        worth_of(case.candidates, found[0], rates, large) - 1e-9
    )


@settings(max_examples=few(100))
@given(seed=SEEDS)
def test_the_order_of_requests_does_not_matter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    drafts, rates = paths(*rng.uniform(0.2, 0.95, 6)), rng.uniform(0.01, 0.2, 6)
    turn = rng.permutation(6)
    turned = Candidates(drafts.worth[turn], drafts.depths[turn])
    first, second = most_valuable(drafts, rates, cost()), most_valuable(turned, rates[turn], cost())
    assert np.array_equal(first[turn], second)


@settings(max_examples=few(100))
@given(seed=SEEDS, each_ms=st.floats(0.01, 3.0))
def test_who_has_no_objective_does_not_pay_for_the_others(seed: int, each_ms: float) -> None:
    rng = np.random.default_rng(seed)
    drafts, rates = paths(*rng.uniform(0.3, 0.95, 6)), rng.choice([0.0, 0.05, 0.2], 6)
    costs = CycleCost(20.0 + each_ms * np.arange(100.0))
    chosen, free = most_valuable(drafts, rates, costs), rates == 0.0
    tokens = 1.0 + (drafts.worth * chosen).sum(axis=1)
    if free.any():
        speed = tokens[free].mean() / costs.ms[chosen.sum()]
        assert speed >= 1.0 / costs.plain_ms - 1e-9


def counts(rates: Sequence[float], costs: CycleCost, *alphas: float) -> list[int]:
    chosen = most_valuable(paths(*alphas), np.array(rates), costs)
    return [int(count) for count in chosen.sum(axis=1)]


def test_who_needs_more_gets_more() -> None:
    hurried, easy = counts([0.1, 0.01], cost(each_ms=1.5), 0.7, 0.7)
    assert hurried > easy


@settings(max_examples=few(100))
@given(seed=SEEDS, roots=st.integers(1, 40), aside=st.integers(0, 5))
def test_where_passes_are_filled_up_nodes_fill_one_or_are_all_or_none(
    seed: int, roots: int, aside: int
) -> None:
    rng = np.random.default_rng(seed)
    tokens = roots + np.arange(300)
    size = np.array(STEPS)[np.searchsorted(STEPS, tokens)]
    costs = CycleCost(10.0 + 0.2 * size, drafting_ms=1.0, filled=size - roots).beside(aside)
    drafts = paths(*rng.uniform(0.3, 0.95, roots))
    nodes = int(most_valuable(drafts, rng.choice(RATES, roots), costs).sum())
    assert nodes in (0, 8 * roots) or roots + aside + nodes in STEPS


def test_prompts_and_nodes_that_are_given_are_no_part_of_what_pays() -> None:
    costs = cost()
    assert costs.whole_ms(4) == costs.ms[4]
    assert CycleCost(costs.ms, 100.0).whole_ms(4) == costs.ms[4] + 100.0
    assert np.array_equal(costs.beside(5).ms, costs.ms[5:])
    assert len(costs.beside(10_000).ms) == 2  # something is left
