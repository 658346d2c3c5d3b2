"""Selections by worth, against what is chosen one node at a time.

Random cases are seeded, half of them with many ties and zeros.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest

from specrouter.cycle import Candidates
from specrouter.slo.tree_selection import Bools, global_greedy, whole
from tests.pure import few
from tests.specrouter.optimal_trees import (
    Forest,
    Node,
    expected_tokens,
    nodes_of,
    random_forest,
)


@dataclass(frozen=True, eq=False)
class Case:
    number: int
    forest: Forest
    budget: int
    most: int

    def chosen(self, budget: int) -> Bools:
        return global_greedy(self.forest.candidates, budget, self.most)


def cases(seed: int, count: int, requests: int = 4, nodes: int = 12) -> Iterator[Case]:
    """Random forests and settings, the same ones for a seed."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        some, width = int(rng.integers(1, requests + 1)), int(rng.integers(nodes + 1))
        forest = random_forest(rng, some, width)
        budget = int(rng.integers(0, len(forest.nodes()) + 3))
        yield Case(number, forest, budget, int(rng.integers(0, nodes + 2)))


def one_at_a_time(forest: Forest, budget: int) -> set[Node]:
    """The likeliest node of all, again and again."""
    chosen: set[Node] = set()
    while len(chosen) < budget and (best := forest.get_top(forest.nodes() - chosen)):
        chosen.add(best)
    return chosen


def test_global_greedy_takes_the_likeliest_node_of_all_one_at_a_time() -> None:
    for case in cases(seed=4, count=few(1500)):
        chosen = global_greedy(case.forest.candidates, case.budget)
        assert nodes_of(chosen) == one_at_a_time(case.forest, case.budget), case.number


def test_what_is_chosen_are_trees_within_the_budget() -> None:
    for case in cases(seed=1, count=few(2000)):
        chosen = case.chosen(case.budget)
        assert case.forest.is_connected(nodes_of(chosen)), case.number
        assert chosen.sum() <= case.budget, case.number
        assert (chosen.sum(axis=1) <= case.most).all(), case.number
        assert case.forest.worth[chosen].all(), case.number


def test_nothing_of_the_budget_is_left_that_could_be_used() -> None:
    for case in cases(seed=2, count=few(2000)):
        possible = np.minimum(case.forest.candidates.counts, case.most).sum()
        assert case.chosen(case.budget).sum() == min(case.budget, possible), case.number


def test_a_larger_budget_only_adds_nodes() -> None:
    for case in cases(seed=3, count=few(1500)):
        less, more = case.chosen(case.budget), case.chosen(case.budget + 1 + case.number % 3)
        assert (less <= more).all(), case.number
        promised = expected_tokens(case.forest.candidates, less)
        after = expected_tokens(case.forest.candidates, more)
        assert (promised <= after + 1e-12).all(), case.number


def test_a_limit_of_a_tree_is_as_if_the_other_nodes_were_not_drafted() -> None:
    for case in cases(seed=7, count=few(1000)):
        kept = whole(case.forest.candidates, case.most)
        small = Forest(
            case.forest.parents,
            np.where(kept, case.forest.depths, 0),
            np.where(kept, case.forest.worth, 0.0),
        )
        cut = replace(case, forest=small)
        assert np.array_equal(case.chosen(case.budget), cut.chosen(case.budget)), case.number


def test_whole_takes_every_node_that_is_worth_anything() -> None:
    for case in cases(seed=9, count=few(100)):
        assert nodes_of(whole(case.forest.candidates)) == case.forest.nodes()


def test_ties_go_to_the_shallower_then_to_the_lower_row_and_index() -> None:
    depths = np.array([[2, 1, 1], [1, 2, 0]])
    candidates = Candidates(np.where(depths > 0, 0.5, 0.0), depths)
    assert candidates.order.tolist() == [[1, 2, 0], [0, 1, 2]]
    taken = [nodes_of(global_greedy(candidates, budget)) for budget in range(6)]
    added = [next(iter(more - less)) for less, more in pairwise(taken)]
    assert added == [(0, 1), (0, 2), (1, 0), (0, 0), (1, 1)]


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (3, 0), (2, 4)])
def test_without_nodes_nothing_is_chosen(shape: tuple[int, int]) -> None:
    candidates = Candidates(np.zeros(shape), np.zeros(shape, dtype=np.int64))
    for chosen in (global_greedy(candidates, 5), whole(candidates)):
        assert chosen.shape == shape
        assert not chosen.any()
        assert expected_tokens(candidates, chosen).tolist() == [1.0] * shape[0]


@pytest.mark.parametrize("budget", [0, -3])
def test_without_a_budget_nothing_is_chosen(budget: int) -> None:
    for case in cases(seed=10, count=few(100)):
        assert not case.chosen(budget).any()
