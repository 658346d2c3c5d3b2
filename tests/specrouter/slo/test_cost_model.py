"""The best budget, and within it objectives first: against all that could have been chosen.

Forests are seeded; half of them have many ties and nodes of worth 0.
"""

import math
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from specrouter.cycle import Candidates
from specrouter.request.params import MAX_CYCLE_NODES, MAX_TREE_TOKENS
from specrouter.slo.cost_model import (
    SPARE_TOKEN,
    THROUGHPUT_TOKEN,
    Choice,
    attainable,
    choose_nodes,
    demanded_rates,
    is_hopeless,
    nearness,
    value,
)
from specrouter.slo.tree_selection import Floats, global_greedy
from tests.specrouter.optimal_trees import Forest, nodes_of, random_forest
from tests.yardstick import Timing, timed

Integers = NDArray[np.int64]
NO_OBJECTIVE = 0.0
LATE = math.inf
SELECTION_MS = {32: 0.5, 256: 3.0}  # for 32 nodes of so many requests, planning included
SLACK = 2.0  # of a machine that does something else as well


def flat(nodes: int, ms: float = 10.0) -> Floats:
    """Costs of a cycle that takes the same time with up to `nodes` nodes, its largest budget."""
    return np.full(nodes + 1, ms)


def steps(nodes: int, first_ms: float = 10.0, each_ms: float = 1.0) -> Floats:
    return first_ms + each_ms * np.arange(nodes + 1.0)


def path(*worth: float) -> list[float]:
    return list(worth)


def requests(*paths: list[float]) -> Candidates:
    """Each a path of nodes of these worths."""
    width = max(map(len, paths))
    worth = np.array([row + [0.0] * (width - len(row)) for row in paths])
    return Candidates(worth, np.where(worth > 0, np.arange(1, width + 1), 0))


def forests(seed: int, count: int, most: int = 4, nodes: int = 12) -> Iterator[Forest]:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield random_forest(rng, int(rng.integers(1, most + 1)), int(rng.integers(nodes + 1)))


def random_costs(rng: np.random.Generator, nodes: int) -> Floats:
    """Never falling, often with stairs, as measured curves are."""
    slope = rng.choice([0.0, 0.02, 0.3, 2.0])
    rise = slope * np.cumsum(rng.random(nodes + 1) * (rng.random(nodes + 1) < 0.7))
    costs: Floats = rng.uniform(1.0, 30.0) + rise
    return costs


def counts(choice: Choice) -> list[int]:
    rows: list[int] = choice.chosen.sum(axis=1).tolist()
    return rows


def expected(forest: Forest, choice: Choice) -> Floats:
    """[B] tokens that the choice promises."""
    tokens: Floats = 1.0 + np.where(choice.chosen, forest.worth, 0.0).sum(axis=1)
    return tokens


# The rate that an objective demands


def rates(decode_ms: float, decoded: int, remaining: int, tpot_ms: float, margin: float) -> float:
    found = demanded_rates(
        np.array([decode_ms]),
        np.array([decoded]),
        np.array([remaining]),
        np.array([tpot_ms]),
        margin,
    )
    return float(found[0])


@pytest.mark.parametrize("margin", [1.0, 1.1, 1.5])
@pytest.mark.parametrize("remaining", [1, 7, 500])
def test_on_schedule_the_objective_itself_is_demanded(margin: float, remaining: int) -> None:
    for decoded in (0, 3, 100):
        rate = rates(50.0 * decoded, decoded, remaining, 50.0, margin)
        assert rate == pytest.approx(margin / 50.0)


def test_without_an_objective_nothing_is_demanded() -> None:
    assert rates(1e9, 0, 5, math.nan, 1.1) == 0.0


@pytest.mark.parametrize("decode_ms", [50.0 * (3 + 4), 50.0 * (3 + 4) + 1, 1e9])
def test_where_all_the_time_is_gone_no_rate_is_enough(decode_ms: float) -> None:
    assert rates(decode_ms, 3, 4, 50.0, 1.1) == math.inf


def test_who_is_ahead_needs_less_and_who_is_behind_more() -> None:
    on_schedule = rates(200.0, 4, 20, 50.0, 1.0)
    assert rates(150.0, 4, 20, 50.0, 1.0) < rates(190.0, 4, 20, 50.0, 1.0) < on_schedule
    assert rates(210.0, 4, 20, 50.0, 1.0) > on_schedule
    assert rates(200.0, 5, 20, 50.0, 1.0) < on_schedule < rates(200.0, 3, 20, 50.0, 1.0)


def test_time_lost_is_made_good_over_the_tokens_that_are_left() -> None:
    # 100 ms behind: 4 tokens in 100 ms, or 10 in 400.
    assert rates(300.0, 4, 4, 50.0, 1.0) == pytest.approx(4 / 100)
    assert rates(300.0, 4, 10, 50.0, 1.0) == pytest.approx(10 / 400)


def test_of_a_long_text_only_the_next_tokens_are_looked_at() -> None:
    far, farther = (rates(300.0, 4, remaining, 50.0, 1.0) for remaining in (1_000, 100_000))
    assert far == farther > rates(200.0, 4, 1_000, 50.0, 1.0)


def test_rates_are_each_requests_own() -> None:
    tpot_ms = np.array([50.0, math.nan, 20.0, 50.0])
    found = demanded_rates(
        np.array([100.0, 100.0, 40.0, 1e6]),
        np.array([2, 2, 2, 2]),
        np.array([9, 9, 9, 9]),
        tpot_ms,
        1.0,
    )
    assert found == pytest.approx([1 / 50, 0.0, 1 / 20, math.inf])


# What tokens are worth


def test_who_needs_nothing_is_in_time_and_who_gets_just_enough_half_of_the_time() -> None:
    tokens = np.array([1.0, 2.0, 4.0])
    assert attainable(tokens, np.zeros(3)).tolist() == [1.0] * 3
    assert attainable(tokens, tokens) == pytest.approx([0.5] * 3)


def test_more_tokens_are_in_time_more_likely() -> None:
    tokens = np.linspace(1.0, 9.0, 50)
    likely = attainable(tokens, np.full(50, 3.0))
    assert (np.diff(likely) > 0).all()
    assert ((likely > 0) & (likely < 1)).all()
    assert (np.diff(attainable(np.full(50, 3.0), tokens)) < 0).all()


def test_only_who_needs_more_than_all_its_nodes_is_hopeless() -> None:
    most = np.array([1.0, 3.0, 3.0, 3.0])
    hopeless = is_hopeless(np.array([0.0, 3.0, 1e3, LATE]), most)
    assert hopeless.tolist() == [False, False, True, True]


def test_a_needed_token_counts_for_the_tokens_that_it_saves() -> None:
    decoded, remaining = np.array([0, 31, 47, 60, 63]), np.array([63, 32, 16, 3, 0])
    near = nearness(decoded, remaining)
    assert near == pytest.approx([64 / 63, 2.0, 4.0, 6.0, 6.0])  # of 64; at most 6
    assert nearness(np.array([30]), np.array([10_000])) == pytest.approx([1.0], abs=0.01)


def worth(
    tokens: float, rate: float, hopeless: bool = False, cycle_ms: float = 10.0, near: float = 1.0
) -> float:
    """Of one request, per millisecond."""
    each = (np.array([[tokens]]), np.array([rate]), np.array([[hopeless]]), np.array([[cycle_ms]]))
    return float(value(*each, np.array([near]))[0, 0])


def test_only_what_an_objective_needs_counts_for_more_near_the_end() -> None:
    far, close = worth(200.0, 0.2), worth(200.0, 0.2, near=3.0)
    assert close - far == pytest.approx(2.0 * 0.2, rel=1e-6)
    for tokens in (1.0, 4.0):
        assert worth(tokens, 0.0, near=3.0) == worth(tokens, 0.0)
        assert worth(tokens, LATE, hopeless=True, near=3.0) == worth(tokens, LATE, hopeless=True)


def test_a_token_that_nobody_waits_for_counts_most_where_there_is_no_objective() -> None:
    free, lost = worth(2.0, 0.0), worth(2.0, LATE, hopeless=True)
    assert free == pytest.approx(THROUGHPUT_TOKEN * 2.0 / 10.0)
    assert lost == pytest.approx(SPARE_TOKEN * 2.0 / 10.0)
    assert 0.0 < lost < free


def test_tokens_that_an_objective_needs_count_in_full_and_further_ones_less() -> None:
    rate = 0.2  # 2 tokens of a cycle
    assert worth(200.0, rate) == pytest.approx(rate + SPARE_TOKEN * 200.0 / 10.0)
    gained = [worth(2.0 + more, rate) - worth(1.0 + more, rate) for more in (0.5, 2.0, 9.0)]
    assert gained == sorted(gained, reverse=True)
    assert gained[-1] == pytest.approx(SPARE_TOKEN / 10.0, rel=1e-3)


def test_a_slower_cycle_is_never_worth_more() -> None:
    for rate in (0.0, 0.05, 0.15, 0.3):
        by_time = [worth(2.0, rate, cycle_ms=ms) for ms in (8.0, 10.0, 12.0, 20.0, 60.0)]
        assert by_time == sorted(by_time, reverse=True)


@pytest.mark.parametrize("rate", [0.05, 0.2, 0.4, 1.0])
def test_who_is_given_up_is_never_worth_more_than_before(rate: float) -> None:
    for tokens in (1.0, 2.0, 5.0):
        assert worth(tokens, rate, hopeless=True) < worth(tokens, rate)


# The best budget, without objectives


def best_rate(forest: Forest, cost_ms: Floats, most: int = MAX_TREE_TOKENS) -> float:
    """By trying how many of its best nodes each request gets."""
    sums = []
    for row in range(len(forest.worth)):
        worths = sorted((forest.f(v) for v in forest.nodes(row)), reverse=True)[:most]
        sums.append([sum(worths[:k]) for k in range(len(worths) + 1)])
    found = 0.0
    for nodes in product(*(range(len(each)) for each in sums)):
        if sum(nodes) < len(cost_ms):
            tokens = sum(1.0 + each[k] for each, k in zip(sums, nodes, strict=True))
            found = max(found, tokens / cost_ms[sum(nodes)])
    return found


def test_without_objectives_no_other_choice_brings_more_tokens_per_millisecond() -> None:
    rng = np.random.default_rng(1)
    sizes = set()
    for forest in forests(seed=1, count=600, most=3, nodes=7):
        batch = len(forest.worth)
        cost_ms = random_costs(rng, int(rng.integers(0, 23)))
        choice = choose_nodes(forest.candidates, np.zeros(batch), cost_ms)
        rate = expected(forest, choice).sum() / choice.cycle_ms
        assert rate == pytest.approx(best_rate(forest, cost_ms), rel=1e-9)
        sizes.add(choice.nodes)
    assert len(sizes) > 10


def test_without_objectives_the_nodes_are_the_best_of_all_requests() -> None:
    rng = np.random.default_rng(2)
    for forest in forests(seed=2, count=300):
        cost_ms = random_costs(rng, 40)
        choice = choose_nodes(forest.candidates, np.zeros(len(forest.worth)), cost_ms)
        best = global_greedy(forest.candidates, choice.nodes)
        assert expected(forest, choice).sum() == pytest.approx(
            len(forest.worth) + forest.worth[best].sum()
        )


def test_without_objectives_the_best_of_many_budgets_is_found() -> None:
    worst = 1.0
    for forest in forests(seed=3, count=40, most=24, nodes=20):
        batch = len(forest.worth)
        ranked = -np.sort(-forest.worth.ravel())
        for each_ms in (0.02, 0.2, 0.6):
            cost_ms = steps(MAX_CYCLE_NODES, each_ms=each_ms * batch / 10)
            choice = choose_nodes(forest.candidates, np.zeros(batch), cost_ms)
            totals = batch + np.concatenate(([0.0], np.cumsum(ranked)))[: len(cost_ms)]
            best = (totals / cost_ms[: len(totals)]).max()
            worst = min(worst, expected(forest, choice).sum() / choice.cycle_ms / best)
    assert worst > 1.0 - 1e-9


def test_nodes_that_cost_nothing_are_all_taken() -> None:
    for forest in forests(seed=4, count=50):
        choice = choose_nodes(forest.candidates, np.zeros(len(forest.worth)), flat(64))
        assert nodes_of(choice.chosen) == forest.nodes()


def test_nodes_that_cost_more_than_they_bring_are_not_taken() -> None:
    for forest in forests(seed=5, count=50):
        # The first node lengthens the cycle by more than the share of tokens that it may bring.
        cost_ms = steps(64, first_ms=10.0, each_ms=10.1)
        choice = choose_nodes(forest.candidates, np.zeros(len(forest.worth)), cost_ms)
        assert choice.nodes == 0
        assert choice.cycle_ms == 10.0


def test_a_stair_of_the_costs_is_filled_but_not_climbed() -> None:
    certain = requests(path(*0.9 ** np.arange(1, 9)), path(*0.9 ** np.arange(1, 9)))
    cost_ms = np.where(np.arange(17) <= 6, 10.0, 40.0)
    assert choose_nodes(certain, np.zeros(2), cost_ms).nodes == 6


def test_a_choice_says_how_many_nodes_it_has_and_what_they_cost() -> None:
    rng = np.random.default_rng(6)
    for forest in forests(seed=6, count=100):
        cost_ms = random_costs(rng, 50)
        rate = rng.choice([NO_OBJECTIVE, 0.1, 0.4, LATE], len(forest.worth))
        choice = choose_nodes(forest.candidates, rate, cost_ms)
        assert choice.nodes == choice.chosen.sum()
        assert choice.cycle_ms == cost_ms[choice.nodes]


# What is chosen


def test_what_is_chosen_are_trees_within_the_limits_and_never_worthless() -> None:
    rng = np.random.default_rng(7)
    with_objectives = 0
    for forest in forests(seed=7, count=1_500):
        batch, most = len(forest.worth), int(rng.integers(0, 14))
        cost_ms = random_costs(rng, int(rng.integers(0, 50)))
        kinds = (np.zeros(batch), rng.uniform(0, 0.6, batch), np.full(batch, LATE))
        rate = np.choose(rng.integers(0, 3, batch), kinds)
        n_max = int(rng.integers(0, 14))
        prompt_tokens = int(rng.choice([0, 0, 40]))
        choice = choose_nodes(forest.candidates, rate, cost_ms, prompt_tokens, n_max, most)
        assert choice.chosen.shape == forest.worth.shape
        assert forest.is_connected(nodes_of(choice.chosen))
        assert (forest.worth[choice.chosen] > 0.0).all()
        assert max(counts(choice), default=0) <= most
        assert choice.nodes <= len(cost_ms) - 1
        with_objectives += bool(choice.nodes) and bool((rate > 0).any())
    assert with_objectives > 300


@pytest.mark.parametrize("shape", [(3, 0), (1, 0)])
def test_requests_without_drafts_get_no_nodes(shape: tuple[int, int]) -> None:
    nothing = Candidates(np.zeros(shape), np.zeros(shape, dtype=np.int64))
    choice = choose_nodes(nothing, np.full(shape[0], 0.1), flat(8))
    assert (choice.nodes, choice.chosen.shape) == (0, shape)


def test_a_cycle_without_room_has_no_nodes() -> None:
    choice = choose_nodes(requests(path(0.9)), np.array([0.5]), np.array([10.0]))
    assert (choice.nodes, choice.cycle_ms) == (0, 10.0)


# Objectives. A cycle takes 10 ms: a rate of 0.15 needs 1.5 tokens of it.

URGENT = path(0.4, 0.3, 0.2, 0.1)  # worth less than what the others have
RICH = path(0.95, 0.9, 0.85, 0.8)


def chosen(*rate: float, nodes: int, paths: list[list[float]], n_max: int = 64) -> list[int]:
    return counts(choose_nodes(requests(*paths), np.array(rate), flat(nodes), n_max=n_max))


def test_an_urgent_request_gets_what_it_needs_before_others() -> None:
    assert chosen(NO_OBJECTIVE, NO_OBJECTIVE, nodes=3, paths=[RICH, URGENT]) == [3, 0]
    assert chosen(NO_OBJECTIVE, 0.15, nodes=3, paths=[RICH, URGENT]) == [1, 2]
    assert chosen(NO_OBJECTIVE, 0.13, nodes=3, paths=[RICH, URGENT]) == [2, 1]


def test_who_needs_no_more_than_its_root_gets_no_node_before_others() -> None:
    for rate in (NO_OBJECTIVE, 0.01, 0.1):
        assert chosen(NO_OBJECTIVE, rate, nodes=3, paths=[RICH, URGENT]) == [3, 0]


def test_what_is_left_goes_to_the_best_nodes_of_all() -> None:
    assert chosen(NO_OBJECTIVE, 0.15, nodes=6, paths=[RICH, URGENT]) == [4, 2]
    assert chosen(NO_OBJECTIVE, 0.15, nodes=7, paths=[RICH, URGENT]) == [4, 3]
    assert chosen(NO_OBJECTIVE, 0.15, nodes=8, paths=[RICH, URGENT]) == [4, 4]


def test_of_two_alike_the_one_that_is_nearer_to_its_end_comes_first() -> None:
    drafts, cost_ms, needs = requests(URGENT, URGENT), flat(2), np.array([0.15, 0.15])
    assert counts(choose_nodes(drafts, needs, cost_ms)) == [2, 0]
    for near, expected in (([1.0, 3.0], [0, 2]), ([3.0, 1.0], [2, 0])):
        assert counts(choose_nodes(drafts, needs, cost_ms, near=np.array(near))) == expected


def test_where_the_budget_does_not_serve_all_the_cheapest_request_comes_first() -> None:
    # They need 4, 1 and 2 nodes; neediest first, one would be served by the first three.
    needs, paths = (0.195, 0.135, 0.165), [URGENT] * 3
    assert chosen(*needs, nodes=3, paths=paths) == [0, 1, 2]
    assert chosen(*needs, nodes=2, paths=paths) == [0, 1, 1]
    assert chosen(*needs, nodes=7, paths=paths) == [4, 1, 2]


def test_the_most_requests_are_served_that_a_budget_can_serve() -> None:
    rng = np.random.default_rng(8)
    for forest in forests(seed=8, count=300, most=4, nodes=8):
        batch = len(forest.worth)
        most = 1.0 + forest.worth.sum(axis=1)
        needed = rng.uniform(1.0, most)  # nobody is hopeless
        budget = int(rng.integers(0, len(forest.nodes()) + 1))
        choice = choose_nodes(forest.candidates, needed / 10.0, flat(budget))
        prices = []
        for row in range(batch):
            worths = sorted((forest.f(v) for v in forest.nodes(row)), reverse=True)
            sums = 1.0 + np.concatenate(([0.0], np.cumsum(worths)))
            prices.append(int((sums < needed[row] - 1e-12).sum()))
        affordable = int((np.cumsum(sorted(prices)) <= budget).sum())
        served = int((expected(forest, choice) >= needed - 1e-9).sum())
        assert served >= affordable or choice.nodes < budget


def test_towards_its_objective_a_request_gets_at_most_n_max_nodes() -> None:
    paths = [RICH, URGENT]
    assert chosen(NO_OBJECTIVE, 0.195, nodes=4, paths=paths) == [0, 4]
    assert chosen(NO_OBJECTIVE, 0.195, nodes=4, paths=paths, n_max=1) == [3, 1]
    assert chosen(NO_OBJECTIVE, 0.195, nodes=8, paths=paths, n_max=1) == [4, 4]  # worth is no limit


@pytest.mark.parametrize("rate", [5.0, LATE])
def test_who_cannot_be_saved_does_not_starve_others(rate: float) -> None:
    assert chosen(rate, NO_OBJECTIVE, nodes=3, paths=[URGENT, RICH]) == [0, 3]
    assert chosen(rate, 0.15, nodes=2, paths=[RICH, URGENT]) == [0, 2]
    assert chosen(rate, 0.15, nodes=4, paths=[RICH, URGENT]) == [2, 2]


def test_who_cannot_be_saved_takes_part_by_worth() -> None:
    for nodes in range(9):
        lost = chosen(LATE, NO_OBJECTIVE, nodes=nodes, paths=[RICH, URGENT])
        assert lost == chosen(NO_OBJECTIVE, NO_OBJECTIVE, nodes=nodes, paths=[RICH, URGENT])


def test_a_batch_of_hopeless_requests_decodes_as_fast_as_one_without_objectives() -> None:
    rng = np.random.default_rng(9)
    for forest in forests(seed=9, count=100):
        cost_ms, batch = random_costs(rng, 23), len(forest.worth)
        lost = choose_nodes(forest.candidates, np.full(batch, LATE), cost_ms)
        free = choose_nodes(forest.candidates, np.zeros(batch), cost_ms)
        assert expected(forest, lost).sum() / lost.cycle_ms == pytest.approx(
            expected(forest, free).sum() / free.cycle_ms
        )


def test_an_urgent_request_is_worth_nodes_that_do_not_pay_for_throughput() -> None:
    drafts = requests(path(0.6, 0.36, 0.22), path(0.6, 0.36, 0.22))
    cost_ms = steps(6, first_ms=10.0, each_ms=3.2)  # a node of a batch of two pays from 0.64 on
    assert choose_nodes(drafts, np.zeros(2), cost_ms).nodes == 0
    urgent = choose_nodes(drafts, np.array([0.1, 0.0]), cost_ms)
    assert counts(urgent)[0] > 0


def test_no_request_is_made_hopeless_to_be_rid_of_what_it_needs() -> None:
    # It needs 2.9 tokens, which is nearly hopeless; 3 worthless nodes of the other one more
    # would make the cycle so slow that it is.
    drafts = requests(path(0.9), path(*[0.001] * 8))
    cost_ms = steps(9, each_ms=0.2)
    needed = 0.29 * cost_ms
    assert is_hopeless(needed, np.full(10, 1.9)).tolist() == [False] * 3 + [True] * 7
    assert choose_nodes(drafts, np.array([0.29, NO_OBJECTIVE]), cost_ms).nodes <= 1


def worth_of(forest: Forest, choice: Choice, rate: Floats) -> float:
    lost = is_hopeless(rate * choice.cycle_ms, 1.0 + forest.worth.sum(axis=1))
    tokens, cycle_ms = expected(forest, choice)[None], np.full((1, 1), choice.cycle_ms)
    return float(value(tokens, rate, lost[None], cycle_ms).sum())


def test_no_smaller_budget_would_have_been_better_for_objectives() -> None:
    rng = np.random.default_rng(11)
    for forest in forests(seed=11, count=200, most=4, nodes=5):
        cost_ms = random_costs(rng, 20)
        rate = rng.choice([NO_OBJECTIVE, 0.03, 0.1, 0.3], len(forest.worth))
        best = worth_of(forest, choose_nodes(forest.candidates, rate, cost_ms), rate)
        for nodes in range(len(cost_ms)):
            fewer = choose_nodes(forest.candidates, rate, cost_ms[: nodes + 1])
            assert best >= worth_of(forest, fewer, rate) - 1e-9


# Prompts


def test_beside_a_prompt_more_nodes_pay_for_requests_without_objectives() -> None:
    drafts = requests(*[path(*0.9 ** np.arange(1, 9))] * 4)
    sizes = []
    for prompt_tokens in (0, 8, 32, 64):
        cost_ms = steps(32, first_ms=14.0 + prompt_tokens)
        choice = choose_nodes(drafts, np.zeros(4), cost_ms, prompt_tokens)
        sizes.append(choice.nodes)
    assert sizes == sorted(sizes)
    assert sizes[-1] > sizes[0]


def test_a_prompt_that_is_read_is_not_kept_waiting_by_nodes_of_little_worth() -> None:
    drafts = requests(*[path(*0.7 ** np.arange(1, 9))] * 4)
    cost_ms = steps(32, first_ms=14.0 + 200.0)
    forgotten = choose_nodes(drafts, np.zeros(4), cost_ms)
    minded = choose_nodes(drafts, np.zeros(4), cost_ms, prompt_tokens=200)
    assert 0 < minded.nodes < forgotten.nodes


# Time


def time_of_selection(batch: int) -> Timing:
    rng = np.random.default_rng(10)
    depths = np.tile(np.arange(32) // 4 + 1, (batch, 1))
    tpot_ms = np.where(rng.random(batch) < 0.6, rng.uniform(10, 80, batch), math.nan)
    cost_ms = steps(MAX_CYCLE_NODES, first_ms=20.0, each_ms=0.05)
    cases = [
        (rng.random((batch, 32)) ** depths, rng.uniform(0, 900, batch), rng.integers(0, 30, batch))
        for _ in range(6)
    ]

    def select(case: tuple[Floats, Floats, Integers]) -> None:
        worth, decode_ms, decoded = case
        rate = demanded_rates(decode_ms, decoded, np.full(batch, 32), tpot_ms)
        assert choose_nodes(Candidates(worth, depths), rate, cost_ms).nodes

    return timed(select, cases)


@pytest.mark.timing
@pytest.mark.parametrize(("batch", "yardsticks"), [(32, 1.5), (256, 5.0)])
def test_selection_takes_a_small_part_of_a_cycle(batch: int, yardsticks: float) -> None:
    assert time_of_selection(batch).yardsticks < yardsticks


@pytest.mark.timing
@pytest.mark.parametrize("batch", SELECTION_MS)
def test_selection_takes_as_long_as_is_promised(batch: int) -> None:
    assert time_of_selection(batch).ms < SLACK * SELECTION_MS[batch]
