"""Selections by worth, against what is chosen one node at a time.

Random cases are seeded, half of them with many ties and zeros.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from specrouter.cycle import Candidates
from specrouter.request.params import MAX_TREE_TOKENS
from specrouter.slo.tree_selection import CycleCost, global_greedy, most_valuable, whole
from tests.pure import few
from tests.specrouter.optimal_trees import Forest, Node, nodes_of, random_forest


def cases(seed: int, count: int) -> Iterator[Forest]:
    """Random forests, the same ones for a seed."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield random_forest(rng, int(rng.integers(1, 5)), int(rng.integers(13)))


def one_at_a_time(forest: Forest, budget: int) -> set[Node]:
    """The likeliest node of all, again and again."""
    chosen: set[Node] = set()
    while len(chosen) < budget and (best := forest.get_top(forest.nodes() - chosen)):
        chosen.add(best)
    return chosen


def test_global_greedy_takes_the_likeliest_node_of_all_one_at_a_time() -> None:
    for number, forest in enumerate(cases(seed=4, count=few(1500))):
        budget = number % (len(forest.nodes()) + 4) - 1
        chosen = nodes_of(global_greedy(forest.candidates, budget))
        assert chosen == one_at_a_time(forest, budget), number
        assert forest.is_connected(chosen), number


def test_no_tree_has_more_nodes_than_a_tree_may_have() -> None:
    long = Candidates(0.99 ** np.arange(1.0, 81.0)[None], np.arange(1, 81)[None])
    costs = CycleCost(10.0 + np.zeros(81))
    for chosen in (
        global_greedy(long, 80),
        whole(long),
        most_valuable(long, np.zeros(1), costs),
        most_valuable(long, np.ones(1), costs),
    ):
        assert np.flatnonzero(chosen[0]).tolist() == list(range(MAX_TREE_TOKENS))


def test_whole_takes_every_node_that_is_worth_anything() -> None:
    for forest in cases(seed=9, count=few(100)):
        assert nodes_of(whole(forest.candidates)) == forest.nodes()


def test_ties_go_to_the_shallower_then_to_the_lower_row_and_index() -> None:
    depths = np.array([[2, 1, 1], [1, 2, 0]])
    candidates = Candidates(np.where(depths > 0, 0.5, 0.0), depths)
    assert candidates.order.tolist() == [[1, 2, 0], [0, 1, 2]]
    taken = [nodes_of(global_greedy(candidates, budget)) for budget in range(6)]
    added = [next(iter(more - less)) for less, more in pairwise(taken)]
    assert added == [(0, 1), (0, 2), (1, 0), (0, 0), (1, 1)]
