"""The predictions against values worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrouter.cycle import DraftShape, Option
from specrouter.profile.acceptance import TreeAcceptance
from specrouter.profile.cycle_times import Workload, curve_of
from specrouter.profile.prediction import OptionGrid, ShapeLimits, acceptance_rate, target_only
from specrouter.profile.snapshot import ChainOutcome, PerformanceSnapshot, TreeKey
from specrouter.request.params import Chain
from tests.specrouter.predictions import PAIR, TRIPLE, flat, geometric, rising, snapshot

ONE = Workload(requests=1)
DEPTH_4 = ShapeLimits(depth=4, width=1, nodes=4)
DEPTH_2 = ShapeLimits(depth=2, width=1, nodes=4)
HALVES = 1 + 0.5 + 0.25 + 0.125 + 0.0625  # tokens of 4 nodes, each half as good as the last


def best(
    chain: Chain,
    known: PerformanceSnapshot,
    limits: ShapeLimits = DEPTH_4,
    workload: Workload = ONE,
) -> Option:
    return OptionGrid(chain, known, workload, limits).best()


def test_steps_without_a_model_rank_no_vocabulary() -> None:
    stages = {"draft": rising(3.0)}
    known = snapshot({"small": rising(0.1, 0.1), "big": flat(10.0)}, {PAIR: 0.5}, stages=stages)
    ngram = replace(known, parameters={"small": 0, "big": 1000})
    three = replace(ONE, requests=3)
    assert best(PAIR, known, workload=three).levels_ms > 4 * 3.0
    assert best(PAIR, ngram, workload=three).levels_ms == pytest.approx(4 * 0.3)


def test_a_pair_costs_its_drafts_and_one_verification() -> None:
    known = snapshot({"small": flat(1.0), "big": rising(10.0)}, {PAIR: 0.5})
    option = best(PAIR, known)
    assert option.route == (PAIR, DraftShape(4, 1, 4))
    assert option.tokens == pytest.approx(HALVES)
    assert option.levels_ms == pytest.approx(4)
    assert option.cycle_ms == pytest.approx(4 + 14)
    assert option.ms_per_token == pytest.approx((4 + 14) / HALVES)


def test_requests_beside_those_that_draft_wait_for_the_drafts_and_gain_a_token_each() -> None:
    stages = {"cycle": rising(0.0, 0.5), "drafting": rising(1.0, 0.5), "verify": flat(0.0)}
    known = snapshot({"small": rising(1.0), "big": rising(10.0)}, {PAIR: 0.5}, stages=stages)
    workload = Workload(requests=2, others=6)
    alone, pair = target_only(known, workload, "big"), best(PAIR, known, workload=workload)
    assert alone.ms_per_token == pytest.approx(10 + 7 + 0.5 * 7)
    assert pair.tokens == pytest.approx(HALVES)
    assert pair.levels_ms == pytest.approx(4 * 2 + 2 + 1)  # the first step reads two tokens each
    assert pair.cycle_ms == pytest.approx(pair.levels_ms + 10 + 7 + 2 * 4 + 0.5 * 7)
    assert pair.ms_per_token == pytest.approx(pair.cycle_ms / ((2 * HALVES + 6) / 8))


def test_a_wide_tree_costs_its_width_in_drafting_and_its_selected_nodes_in_verifying() -> None:
    known = snapshot({"small": rising(1.0), "big": rising(10.0)}, {PAIR: 0.5})
    option = best(PAIR, known, ShapeLimits(depth=3, width=2, nodes=4))
    assert option.route == (PAIR, DraftShape(3, 2, 4))
    assert option.levels_ms == pytest.approx(2 + 2 * 2.0)
    assert option.cycle_ms == pytest.approx(6 + 14)
    second = 1.0 - 0.5 ** (2**0.64) - 0.5  # chance of a second choice, by the law
    assert option.tokens == pytest.approx(1 + 0.5 + 0.25 + second + 0.125)


@pytest.mark.parametrize("chain", [PAIR, TRIPLE])
def test_drafting_costs_the_engine_more_than_a_cycle_without(chain: Chain) -> None:
    known, limits = triple(), replace(DEPTH_2, nodes=2)
    bare = best(chain, known, limits)
    for stages, levels_ms, all_ms in (
        ({"cycle": flat(2.0)}, 0.0, 2.0),
        ({"cycle": flat(2.0), "drafting": flat(5.0)}, 3.0, 5.0),
        ({"drafting": flat(5.0)}, 5.0, 5.0),
        ({"cycle": flat(2.0), "drafting": flat(1.0)}, 0.0, 2.0),
    ):
        option = best(chain, replace(known, stages=stages), limits)
        assert option.levels_ms == pytest.approx(bare.levels_ms + levels_ms)
        assert option.cycle_ms == pytest.approx(bare.cycle_ms + all_ms)


def test_what_is_left_open_is_chosen_by_the_least_time_per_token() -> None:
    known = snapshot({"small": flat(1.0), "big": rising(10.0)}, {PAIR: 0.5})
    found = best(PAIR, known, ShapeLimits())
    tried = [
        best(PAIR, known, ShapeLimits(depth, width, nodes))
        for depth in (1, 2, 3, 4, 6)
        for width in (1, 2)
        for nodes in range(1, depth * width + 1)
    ]
    assert found.ms_per_token == pytest.approx(min(option.ms_per_token for option in tried))


def test_greedy_and_sampled_requests_have_rates_of_their_own() -> None:
    known = snapshot({"small": flat(1.0), "big": flat(10.0)}, {PAIR: 0.5})
    trees = {**known.trees, (("small",), "big", False): geometric(0.9)}
    known = replace(known, trees=trees)
    greedy = best(PAIR, known, workload=replace(ONE, sampled=False))
    assert greedy.tokens > best(PAIR, known).tokens == pytest.approx(HALVES)


def triple(**others: float) -> PerformanceSnapshot:
    times = {"small": flat(1.0), "middle": rising(3.0), "big": rising(10.0)}
    return snapshot(times, {("small", "middle"): 0.5}, {("middle", "big"): 0.8}, **others)


def test_an_intermediate_offers_what_it_accepts_and_its_own_token() -> None:
    option = best(TRIPLE, triple(), DEPTH_2)
    # Of 2 drafts 0.75 pass, so 1.75 are offered; each succeeds in 0.8 of the cases.
    assert option.shape.nodes == 2
    assert option.tokens == pytest.approx(1 + 0.8 + 0.75 * 0.8**2)
    assert option.levels_ms == pytest.approx(2 + 5)
    assert option.cycle_ms == pytest.approx(7 + 12)


def test_what_was_seen_of_a_whole_chain_outweighs_what_its_parts_promise() -> None:
    known = triple()
    trees = {**known.trees, (("small", "middle"), "big", True): geometric(0.5)}
    option = best(TRIPLE, replace(known, trees=trees), DEPTH_2)
    assert option.tokens == pytest.approx(1 + 0.5 + 0.75 * 0.5**2)


def test_catching_up_is_spread_over_the_tokens_that_are_left() -> None:
    known = snapshot({"small": rising(1.0, 0.1), "big": rising(10.0)}, {PAIR: 0.5})
    behind = Workload(requests=1, remaining=20.0, lags={"small": 21.0, "middle": 500.0})
    plain, late = best(PAIR, known), best(PAIR, known, workload=behind)
    assert late.ms_per_token == pytest.approx(plain.ms_per_token + 3.0 / 20)
    assert late.cycle_ms == plain.cycle_ms


def test_earlier_outcomes_correct_a_prediction() -> None:
    outcomes = {
        (PAIR, 1, True): ChainOutcome(time=1.2, tokens=0.5),
        (("big",), 1, True): ChainOutcome(time=0.9),
    }
    known = snapshot({"small": flat(1.0), "big": rising(10.0)}, {PAIR: 0.5}, outcomes=outcomes)
    option = best(PAIR, known)
    assert option.cycle_ms == pytest.approx(1.2 * 18)
    assert option.levels_ms == pytest.approx(1.2 * 4)
    assert option.tokens == pytest.approx(1 + (HALVES - 1) / 2)
    assert option.ms_per_token == pytest.approx(1.2 * 18 / option.tokens)
    assert (option.plain_ms, option.plain_tokens) == pytest.approx((18, HALVES))
    alone = target_only(known, ONE, "big")
    assert (alone.ms_per_token, alone.plain_ms) == pytest.approx((9.0, 10.0))
    greedy = replace(ONE, sampled=False)  # of which nothing is known yet
    option = best(PAIR, known, workload=greedy)
    assert (option.cycle_ms, option.tokens) == (option.plain_ms, option.plain_tokens)
    assert not option.sampled
    assert target_only(known, greedy, "big").ms_per_token == pytest.approx(10.0)


@pytest.mark.parametrize("chain", [PAIR, TRIPLE])
def test_a_prediction_like_an_option_is_its_own(chain: Chain) -> None:
    known = triple()
    grid = OptionGrid(chain, known, ONE, ShapeLimits())
    option = grid.best()
    assert grid.like(option) == option
    slower = replace(known, times={**known.times, "big": flat(99.0)})
    found = OptionGrid(chain, slower, ONE, ShapeLimits()).like(option)
    assert found is not None
    assert found.route == option.route
    assert found.cycle_ms > option.cycle_ms


def test_there_is_no_prediction_like_an_option_that_is_not_allowed() -> None:
    known = triple()
    option = best(PAIR, known)
    deep = replace(option, shape=replace(option.shape, depth=7))
    for limits, wanted in (
        (ShapeLimits(depth=2), option),
        (ShapeLimits(nodes=3), option),
        (ShapeLimits(), deep),
    ):
        assert OptionGrid(PAIR, known, ONE, limits).like(wanted) is None


@given(alpha=st.floats(0.01, 0.99), requests=st.integers(1, 16), later=st.floats(0.01, 0.99))
def test_expected_tokens_rise_with_the_nodes_and_stay_within_bounds(
    alpha: float, later: float, requests: int
) -> None:
    promised = {("small", "middle"): alpha, ("middle", "big"): later}
    known = snapshot({"big": rising(10.0)}, alpha=promised)
    grid = OptionGrid(TRIPLE, known, Workload(requests=requests), ShapeLimits())
    assert (np.diff(grid.tokens, axis=1) >= -1e-9).all()
    assert (grid.tokens >= 1.0).all()
    assert (grid.tokens <= 1.0 + grid.nodes + 1e-9).all()
    assert (grid.ms_per_token > 0.0).all()


DOMINANCE_TOKENS = 0.01  # that an option on the menu may be worse than one that is not


@given(
    alpha=st.floats(0.02, 0.98),
    later=st.floats(0.02, 0.98),
    requests=st.integers(1, 32),
    is_pair=st.booleans(),
    each_ms=st.floats(0.0, 0.5),
    limits=st.sampled_from(
        [ShapeLimits(), ShapeLimits(width=1), ShapeLimits(nodes=5), ShapeLimits(whole_trees=True)]
    ),
)
@settings(deadline=None)
def test_the_menu_holds_the_best_option_of_every_size_however_dear_levels_are(
    alpha: float, later: float, requests: int, is_pair: bool, each_ms: float, limits: ShapeLimits
) -> None:
    chain, promised = (TRIPLE, {("small", "middle"): alpha, ("middle", "big"): later})
    if is_pair:
        chain, promised = PAIR, {PAIR: alpha}
    known = snapshot({"big": rising(10.0), "small": rising(0.5, each_ms)}, alpha=promised)
    grid = OptionGrid(chain, known, Workload(requests=requests), limits)
    rows, columns = np.nonzero(grid.allowed)
    nodes, tokens = grid.nodes[rows, columns], grid.tokens[rows, columns]
    levels_ms, menu = grid.levels_ms[rows, 0], grid.menu
    assert set(menu.nodes.tolist()) == set(nodes.tolist())
    for size in set(nodes.tolist()):
        for price in (0.0, 0.01, 0.1, 1.0, 10.0):  # tokens per millisecond of levels
            worth = (tokens - price * levels_ms)[nodes == size].max()
            offered = (menu.tokens - price * menu.levels_ms)[menu.nodes == size].max()
            assert worth - DOMINANCE_TOKENS <= offered <= worth


def test_what_is_on_the_menu_stands_in_the_grid() -> None:
    known = snapshot({"small": flat(1.0), "big": rising(10.0)}, {PAIR: 0.5})
    grid = OptionGrid(PAIR, known, Workload(requests=4), ShapeLimits())
    menu = grid.menu
    assert grid.allowed[menu.rows, menu.columns].all()
    assert len(menu.nodes) < grid.allowed.sum() / 4
    for row, column, nodes, tokens, levels_ms in zip(
        menu.rows, menu.columns, menu.nodes, menu.tokens, menu.levels_ms, strict=True
    ):
        option = grid.option(row, column)
        assert (option.shape.nodes, option.tokens, option.levels_ms) == (nodes, tokens, levels_ms)
        assert option.chain == PAIR

    # And of as many nodes none is both dearer and worse.
    for size in set(menu.nodes.tolist()):
        ordered = np.argsort(menu.levels_ms[menu.nodes == size])
        assert (np.diff(menu.levels_ms[menu.nodes == size][ordered]) > 0).all()
        assert (np.diff(menu.tokens[menu.nodes == size][ordered]) > 0).all()


def test_an_untried_model_is_assumed_to_cost_its_share_of_the_targets_time() -> None:
    known = snapshot({"big": flat(10.0)})
    assert curve_of(known, "middle", "big").at(1) == pytest.approx(1.0)
    assert curve_of(known, "small", "big").at(1) == pytest.approx(0.2)  # 1% counts as 2%


def test_observed_acceptance_weighs_by_its_evidence() -> None:
    known = snapshot({}, {PAIR: 0.9}, {PAIR: 0.6})
    assert acceptance_rate(PAIR[:1], PAIR[1], known) == pytest.approx(0.9)
    trees: dict[TreeKey, TreeAcceptance] = {
        (("small",), "big", True): replace(geometric(0.9), trials=12.0)
    }
    assert acceptance_rate(PAIR[:1], PAIR[1], replace(known, trees=trees)) == pytest.approx(
        (0.9 + 0.6) / 2
    )
    assert acceptance_rate(PAIR[:1], PAIR[1], replace(known, trees=trees), sampled=False) == 0.6
