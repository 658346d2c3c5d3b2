"""AdaServe's selections choose at once what its algorithms choose one node at a time.

Random cases are seeded, half of them with many ties and zeros.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pytest

from research.policies.adaserve import (
    Bools,
    Floats,
    Order,
    equal_greedy,
    needed_tokens,
    slo_customized,
)
from specrouter.cycle import Candidates
from specrouter.request.params import MAX_TREE_TOKENS
from specrouter.slo.tree_selection import global_greedy
from tests.pure import few
from tests.specrouter.optimal_trees import (
    ROOT,
    Forest,
    algorithm_2,
    expected_tokens,
    nodes_of,
    random_forest,
)
from tests.yardstick import Timing, timed

NOBODY = -math.inf
UNLIMITED = 1000


@dataclass(frozen=True, eq=False, kw_only=True)
class Case:
    number: int
    forest: Forest
    needs: Floats
    budget: int
    n_max: int
    root_credit: float
    order: Order

    def slo(self, budget: int) -> Bools:
        return slo_customized(
            self.forest.candidates,
            self.needs,
            budget,
            self.n_max,
            int(self.forest.depths.max(initial=0)),
            self.root_credit,
            self.order,
        )

    def chosen(self, budget: int) -> dict[str, Bools]:
        """By both selections, which have a budget."""
        return {
            "adaserve": self.slo(budget),
            "equal-greedy": equal_greedy(self.forest.candidates, budget),
        }


def cases(seed: int, count: int, requests: int = 4, nodes: int = 12) -> Iterator[Case]:
    """Random forests and settings, the same ones for a seed."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        some, width = int(rng.integers(1, requests + 1)), int(rng.integers(nodes + 1))
        forest = random_forest(rng, some, width)
        kinds = (rng.uniform(0, 4, some), rng.integers(-2, 16, some) / 4, np.full(some, NOBODY))
        yield Case(
            number=number,
            forest=forest,
            needs=np.choose(rng.integers(0, 3, some), kinds),
            budget=int(rng.integers(0, len(forest.nodes()) + 3)),
            n_max=int(rng.integers(0, nodes + 2)),
            root_credit=float(rng.integers(0, 2)),
            order="neediest" if rng.random() < 0.5 else "easiest",
        )


# AdaServe's Figure 5. Its numbers: budget 8 with two roots, depth 3, width 2, needs of 0.6 and 0.8,
# f(t1 of r0) = 0.7, f(t1 of r1) = 0.5, f(t2 of r1) = 0.4, who is chosen, and in which order. The
# other probabilities and who descends from whom are filled in to agree with that.

FIGURE_5 = Forest(
    parents=np.array([[ROOT, ROOT, 0, 0, 2, 2], [ROOT, ROOT, 0, 1, 2, 3]]),
    depths=np.array([[1, 1, 2, 2, 3, 3], [1, 1, 2, 2, 3, 3]]),
    worth=np.array([[0.7, 0.1, 0.5, 0.08, 0.25, 0.2], [0.5, 0.4, 0.3, 0.2, 0.15, 0.1]]),
)
FIGURE_5_NEEDS = np.array([0.6, 0.8])
T1, T2, T3, T4, T5, T6 = range(6)


def figure_5(budget_tokens: int, root_credit: float = 0.0) -> set[tuple[int, int]]:
    chosen = slo_customized(
        FIGURE_5.candidates,
        FIGURE_5_NEEDS,
        budget_tokens - 2,
        n_max=UNLIMITED,
        depth=3,
        root_credit=root_credit,
    )
    return nodes_of(chosen)


def test_figure_5_of_adaserve() -> None:
    for_objectives = {(0, T1), (1, T1), (1, T2)}
    assert figure_5(budget_tokens=4) == {(1, T1), (1, T2)}, "the needier one comes first"
    assert figure_5(budget_tokens=5) == for_objectives
    assert figure_5(budget_tokens=6) == for_objectives | {(0, T3)}
    assert figure_5(budget_tokens=7) == for_objectives | {(0, T3), (1, T3)}
    assert figure_5(budget_tokens=8) == for_objectives | {(0, T3), (1, T3), (0, T5)}


def test_figure_5_where_roots_count_leaves_nothing_to_the_objectives() -> None:
    best = nodes_of(global_greedy(FIGURE_5.candidates, 3))
    assert best == {(0, T1), (0, T3), (1, T1)}  # 0.7, 0.5 and 0.5
    assert figure_5(budget_tokens=5, root_credit=1.0) == best
    assert figure_5(budget_tokens=5, root_credit=0.0) != best


def test_selections_are_trees_within_their_budget() -> None:
    for case in cases(seed=1, count=few(2000)):
        for name, chosen in case.chosen(case.budget).items():
            assert case.forest.is_connected(nodes_of(chosen)), (case.number, name)
            assert chosen.sum() <= case.budget, (case.number, name)
            assert case.forest.worth[chosen].all(), (case.number, name)


def test_a_larger_budget_only_adds_nodes() -> None:
    for case in cases(seed=3, count=few(1500)):
        less, more = case.chosen(case.budget), case.chosen(case.budget + 1 + case.number % 3)
        for name, chosen in less.items():
            assert (chosen <= more[name]).all(), (case.number, name)
            promised = expected_tokens(case.forest.candidates, chosen)
            after = expected_tokens(case.forest.candidates, more[name])
            assert (promised <= after + 1e-12).all(), (case.number, name)


def test_slo_customized_is_algorithm_2_one_token_less_generous() -> None:
    some = cases(seed=4, count=few(1500))
    large = cases(seed=12, count=20, requests=40, nodes=32)
    for case in chain(some, large):
        expected = algorithm_2(
            case.forest,
            case.needs.tolist(),
            case.budget + len(case.needs) - 1,  # roots count, and `B >= 0` spends one more
            case.n_max,
            int(case.forest.depths.max(initial=0)),
            case.root_credit,
            case.order == "neediest",
        )
        assert nodes_of(case.slo(case.budget)) == expected, case.number


def test_no_tree_has_more_nodes_than_a_tree_may_have() -> None:
    long = Candidates(0.99 ** np.arange(1.0, 81.0)[None], np.arange(1, 81)[None])
    for needs in (NOBODY, 70.0):
        chosen = slo_customized(long, np.array([needs]), 80, UNLIMITED, depth=80)
        assert chosen.sum() == MAX_TREE_TOKENS
    assert equal_greedy(long, 80).sum() == MAX_TREE_TOKENS


def test_equal_greedy_gives_what_is_left_over_to_the_first_requests() -> None:
    worth = np.array([[0.1, 0.3, 0.2], [0.9, 0.8, 0.7], [0.6, 0.0, 0.0]])
    candidates = Candidates(worth, np.where(worth > 0, 1, 0))
    assert equal_greedy(candidates, 5).tolist() == [
        [False, True, True],
        [True, True, False],
        [True, False, False],
    ]
    assert equal_greedy(candidates, 9).sum() == 7  # the third has but one


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (3, 0), (2, 4)])
def test_without_nodes_nothing_is_chosen(shape: tuple[int, int]) -> None:
    candidates = Candidates(np.zeros(shape), np.zeros(shape, dtype=np.int64))
    needs = np.full(shape[0], 2.0)
    for chosen in (slo_customized(candidates, needs, 5, 4, 3), equal_greedy(candidates, 5)):
        assert chosen.shape == shape
        assert not chosen.any()
        assert expected_tokens(candidates, chosen).tolist() == [1.0] * shape[0]


@pytest.mark.parametrize("budget", [0, -3])
def test_without_a_budget_nothing_is_chosen(budget: int) -> None:
    for case in cases(seed=10, count=few(100)):
        assert not any(chosen.any() for chosen in case.chosen(budget).values())


def needs_of(
    decode_ms: float, decoded_tokens: int, tpot_ms: float, cycle_ms: float = 40.0
) -> float:
    each = np.array([decode_ms]), np.array([decoded_tokens]), np.array([tpot_ms])
    return float(needed_tokens(*each, cycle_ms)[0])


def test_needed_tokens_by_hand() -> None:
    # (200 + 1.05 * 40) / 50 - 3
    assert needs_of(200.0, 3, 50.0) == pytest.approx(1.84)
    exact = needed_tokens(np.array([200.0]), np.array([3]), np.array([50.0]), 40.0, margin=1.0)
    assert exact == pytest.approx([1.8])


def test_without_an_objective_nothing_is_needed() -> None:
    needs = needed_tokens(np.zeros(2), np.zeros(2, np.int64), np.array([math.nan, 30.0]), 40.0)
    assert needs.tolist() == [NOBODY, pytest.approx(1.4)]


def time_of_selection(requests: int) -> Timing:
    rng = np.random.default_rng(11)
    depths = np.tile(np.arange(32) // 4 + 1, (requests, 1))
    worth = rng.random((requests, 32)) ** depths
    decode_ms, tpot_ms = rng.uniform(0, 500, requests), rng.choice([30.0, 50.0, math.nan], requests)
    tokens = (decode_ms / 40).astype(np.int64)

    def select(worth: Floats) -> None:
        needs = needed_tokens(decode_ms, tokens, tpot_ms, 40.0)
        slo_customized(Candidates(worth, depths), needs, 8 * requests, 10, 8)

    return timed(select, [worth])


@pytest.mark.timing
@pytest.mark.parametrize(("requests", "yardsticks", "promised_ms"), [(32, 1, 0.5), (256, 4, 3.0)])
def test_selection_takes_as_long_as_is_promised(
    requests: int, yardsticks: float, promised_ms: float
) -> None:
    """Twice that on a busy machine."""
    found = time_of_selection(requests)
    assert found.yardsticks < yardsticks
    assert found.ms < 2 * promised_ms
