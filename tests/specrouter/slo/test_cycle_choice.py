"""Who takes part in a cycle and how large the drafts are, against all that could have been chosen.

Most crowds are served by a target whose pass takes 10 ms and one more for every further token.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specrouter.profile.prediction import Limits, OptionGrid, Workload, verification_ms
from specrouter.profile.snapshot import Outcome, PerformanceSnapshot, load_of, outcome_of
from specrouter.profile.time_curve import TimeCurve
from specrouter.slo.cost_model import PROMPT_TOKEN, THROUGHPUT_TOKEN
from specrouter.slo.cycle_choice import (
    _FASTER,
    _MOST_NODES,
    LONGEST_WAIT,
    CycleChoice,
    choose_cycle,
)
from tests.specrouter.predictions import PAIR, TRIPLE, flat, rising, snapshot
from tests.yardstick import Timing, timed

Floats = NDArray[np.float64]
OPEN = Limits()
FREE, LOST = 0.0, np.inf  # without an objective; with one that nothing can attain
MENU = 0.99  # of the best value, that options which are not on the menu may cost
CHOICE_MS = {32: 1.0, 256: 2.0}  # for so many requests
SLACK = 2.0  # of a machine that does something else as well


def target_of(alpha: float, each_ms: float = 1.0, draft_ms: float = 0.1) -> PerformanceSnapshot:
    """Drafts whose j-th node is accepted with chance alpha ** j."""
    return snapshot({"small": flat(draft_ms), "big": rising(10.0, each_ms)}, {PAIR: alpha})


def choose(
    known: PerformanceSnapshot,
    rates: Sequence[float] | Floats,
    *,
    waited: Sequence[int] | None = None,
    prompt_tokens: int = 0,
    others: int = 0,
    limits: Limits = OPEN,
    reading_ms: float = 0.0,
    catch_up_ms: float = 0.0,
    near: Sequence[float] | None = None,
) -> CycleChoice:
    count = len(rates)
    grid = OptionGrid(PAIR, known, Workload(count), limits)
    cycles = np.zeros(count, np.int64) if waited is None else np.array(waited)
    wanted = np.array(rates, float)
    nearby = None if near is None else np.array(near)
    return choose_cycle(
        known, grid, wanted, cycles, prompt_tokens, others, reading_ms, catch_up_ms, nearby
    )


def route(choice: CycleChoice) -> object:
    return choice.option and choice.option.route


def plain_ms(known: PerformanceSnapshot, count: int, prompt_tokens: int = 0) -> float:
    """Of a cycle without drafts."""
    alone = verification_ms(known, Workload(count), "big", np.array([count]), prompt_tokens)
    return known.machine * float(alone[0])


# Without objectives


def best_value(
    known: PerformanceSnapshot, count: int, prompt_tokens: int, others: int
) -> tuple[float, float]:
    """Of a cycle without drafts, and of all options of the grid, one by one."""
    grid = OptionGrid(PAIR, known, Workload(count), Limits())
    beside = PROMPT_TOKEN * prompt_tokens + THROUGHPUT_TOKEN * others

    def value(nodes: int, tokens: float, levels_ms: float, correction: float) -> float:
        batch = np.array([count + others])
        places = batch + count * nodes
        target = verification_ms(known, grid.workload, "big", places, prompt_tokens, batch)
        cycle_ms = known.machine * correction * (levels_ms + float(target[0]))
        return (THROUGHPUT_TOKEN * count * tokens + beside) / cycle_ms

    drafting = [
        value(int(grid.nodes[at]), float(grid.tokens[at]), float(grid.levels_ms[at[0], 0]), factor)
        for at in zip(*np.nonzero(grid.allowed & (grid.nodes <= _MOST_NODES)), strict=True)
        for factor in (grid.correction,)
    ]
    plain = outcome_of(known, ("big",), count, True).time
    return value(0, 1.0, 0.0, plain), max(drafting)


@given(
    alpha=st.floats(0.05, 0.97),
    each_ms=st.floats(0.01, 2.0),
    draft_ms=st.floats(0.01, 4.0),
    count=st.integers(1, 24),
    prompt_tokens=st.sampled_from([0, 0, 9, 64, 300]),
    others=st.sampled_from([0, 0, 3, 20]),
    machine=st.sampled_from([1.0, 1.4]),
    slower=st.sampled_from([1.0, 1.2]),
    alone=st.sampled_from([1.0, 0.8, 1.3]),
)
@example(0.375, 1.0, 1.0, 1, 9, 0, 1.0, 1.0, 1.0)
@settings(deadline=None, max_examples=60)
def test_without_objectives_all_take_part_in_the_cycle_that_is_worth_most(
    alpha: float,
    each_ms: float,
    draft_ms: float,
    count: int,
    prompt_tokens: int,
    others: int,
    machine: float,
    slower: float,
    alone: float,
) -> None:
    load = load_of(count)
    known = replace(
        target_of(alpha, each_ms, draft_ms),
        machine=machine,
        outcomes={(PAIR, load, True): Outcome(slower), (("big",), load, True): Outcome(alone)},
    )
    choice = choose(known, [FREE] * count, prompt_tokens=prompt_tokens, others=others)
    assert choice.active.all()
    plain, drafting = best_value(known, count, prompt_tokens, others)
    if choice.option is None:
        assert choice.value == pytest.approx(plain)
        assert MENU * drafting <= _FASTER * plain
    else:
        assert choice.option.nodes <= _MOST_NODES
        assert MENU * drafting <= choice.value <= drafting * (1 + 1e-9)
        # The margin is on what the requests gain, not on what comes either way.
        beside = PROMPT_TOKEN * prompt_tokens + THROUGHPUT_TOKEN * others
        either_way = plain * beside / (THROUGHPUT_TOKEN * count + beside)
        assert choice.value - either_way > _FASTER * (plain - either_way) * (1 - 1e-9)
        gained = THROUGHPUT_TOKEN * count * choice.option.tokens + beside
        assert choice.value == pytest.approx(gained / choice.option.cycle_ms)


@pytest.mark.parametrize("alpha", [0.5, 0.7, 0.9])
def test_a_cycle_like_all_others_has_the_drafts_that_were_decided_for_all(alpha: float) -> None:
    known = target_of(alpha)
    found = choose(known, [FREE] * 4).option
    best = OptionGrid(PAIR, known, Workload(4), Limits()).best()
    assert found is not None
    assert found.ms_per_token == pytest.approx(best.ms_per_token, rel=1 - MENU)
    assert found.plain_ms > 0.0  # a prediction that its outcome will be compared with


@pytest.mark.parametrize(("alpha", "count"), [(0.7, 16), (0.9, 4), (0.9, 16)])
def test_beside_a_prompt_trees_are_larger(alpha: float, count: int) -> None:
    sizes = []
    for prompt_tokens in (0, 30, 60, 120):
        option = choose(target_of(alpha), [FREE] * count, prompt_tokens=prompt_tokens).option
        assert option is not None
        assert (option.plain_ms == 0.0) == (prompt_tokens > 0)  # says nothing of other cycles
        sizes.append(option.nodes)
    assert sizes == sorted(sizes)
    assert sizes[-1] > sizes[0]


def test_what_a_cycle_takes_holds_prompts_and_the_rows_of_others() -> None:
    known = target_of(0.9)
    for prompt_tokens, others in ((0, 0), (50, 0), (0, 5), (50, 5)):
        option = choose(known, [FREE] * 4, prompt_tokens=prompt_tokens, others=others).option
        assert option is not None
        places = np.array([4 + others + 4 * option.nodes])
        target_ms = verification_ms(known, Workload(4), "big", places, prompt_tokens)
        assert option.cycle_ms == pytest.approx(option.levels_ms + float(target_ms[0]), rel=0.01)


@pytest.mark.parametrize("each_ms", [0.1, 0.5, 1.0])
def test_the_more_others_wait_for_drafts_the_less_is_drafted(each_ms: float) -> None:
    known = target_of(0.7, each_ms, draft_ms=0.5)
    options = [choose(known, [FREE] * 4, others=count).option for count in (0, 4, 10, 100)]
    nodes = [0 if option is None else option.nodes for option in options]
    assert nodes == sorted(nodes, reverse=True)
    assert nodes[0] > nodes[2] >= nodes[-1] == 0


@pytest.mark.parametrize(("reading_ms", "catch_up_ms"), [(30.0, 0.0), (0.0, 4.0), (9.0, 3.0)])
def test_what_drafters_read_is_part_of_what_a_cycle_takes(
    reading_ms: float, catch_up_ms: float
) -> None:
    known = target_of(0.8)
    before = choose(known, [FREE] * 4).option
    option = choose(known, [FREE] * 4, reading_ms=reading_ms, catch_up_ms=catch_up_ms).option
    assert before is not None
    assert option is not None
    assert option.nodes >= before.nodes  # nodes cost the less of a longer cycle
    assert option.cycle_ms >= before.cycle_ms + reading_ms + catch_up_ms


def test_drafts_that_have_to_be_read_for_must_be_worth_that_too() -> None:
    known = target_of(0.5)
    assert choose(known, [FREE] * 4).option is not None
    assert choose(known, [FREE] * 4, reading_ms=200.0).option is not None
    assert choose(known, [FREE] * 4, catch_up_ms=200.0).option is None


def test_what_drafters_read_makes_requests_late() -> None:
    """They need more of a cycle that takes longer, until they cannot be saved."""
    known = target_of(0.05)
    rates = [1.2 / plain_ms(known, 4)] * 4
    assert choose(known, rates).value > choose(known, rates, reading_ms=20.0).value


@pytest.mark.parametrize("rate", [FREE, 0.02, 0.04, LOST])
@pytest.mark.parametrize(
    "known",
    [target_of(0.9, draft_ms=80.0), target_of(0.02), target_of(0.3, each_ms=10.0)],
    ids=["slow drafter", "bad drafter", "dear nodes"],
)
def test_nobody_drafts_where_drafts_do_not_pay(known: PerformanceSnapshot, rate: float) -> None:
    for count in (2, 12):
        assert choose(known, [rate] * count).option is None


def test_what_is_allowed_holds_in_one_cycle_too() -> None:
    narrow = Limits(depth=2, width=1)
    for rates, prompt_tokens in (([FREE] * 4, 90), ([0.06, 0.06, FREE, FREE], 0)):
        option = choose(target_of(0.8), rates, prompt_tokens=prompt_tokens, limits=narrow).option
        assert option is not None
        assert (option.depth, option.width) == (2, 1)
        assert option.nodes <= 2


# With objectives

CROWD_MS = 10.0 + 15.0  # a cycle of sixteen without drafts


def crowd(rate: float, others: float = FREE) -> list[float]:
    return [rate] * 4 + [others] * 12


@pytest.mark.parametrize("needed", [0.95, 1.05, 1.2])
def test_urgent_requests_have_drafts_that_do_not_pay_for_all(needed: float) -> None:
    known = target_of(0.5)
    assert choose(known, crowd(FREE)).option is None
    choice = choose(known, crowd(needed / CROWD_MS))
    assert choice.active[:4].all()
    assert choice.option is not None
    assert choice.option.tokens > needed
    assert choice.option.plain_ms == 0.0  # made for these requests, it predicts no other cycle


def test_needs_of_requests_near_their_end_weigh_more() -> None:
    """Those without an objective sit out sooner for them."""
    known, rates = target_of(0.45), crowd(1.4 / CROWD_MS)
    found = [choose(known, rates, near=[each] * 4 + [1.0] * 12) for each in (1.0, 2.0, 6.0)]
    active = [int(choice.active.sum()) for choice in found]
    assert active == sorted(active, reverse=True)
    assert active[0] > active[-1] >= 4
    assert all(choice.active[:4].all() for choice in found)
    free = choose(known, rates, near=[1.0] * 4 + [6.0] * 12)  # they need no tokens
    assert np.array_equal(free.active, found[0].active)


@pytest.mark.parametrize("needed", [1.4, 1.7, 2.0])
def test_where_only_the_urgent_have_nodes_an_option_says_how_many_all_have_in_the_mean(
    needed: float,
) -> None:
    choice = choose(target_of(0.8), [needed / CROWD_MS] * 2 + [FREE] * 14)
    assert choice.option is not None
    active = int(choice.active.sum())
    spent = round(choice.option.cycle_ms - (10.0 + active - 1) - 0.1)  # on nodes, 1 ms each
    assert 4 <= spent < active  # two trees
    assert choice.option.depth * choice.option.width >= 2
    assert choice.option.nodes == 1


@pytest.mark.parametrize("rate", [FREE, 0.1 / CROWD_MS, 0.5 / CROWD_MS, LOST])
def test_without_an_urgent_request_drafts_are_for_all_or_nobody(rate: float) -> None:
    assert choose(target_of(0.5), crowd(rate)).option is None


CROWDED = target_of(0.05, each_ms=2.0)  # four take 16 ms, sixteen 40; drafts are no help
FOUR_MS = 16.0


@pytest.mark.parametrize("lost", [LOST, 9.0])
def test_who_cannot_be_saved_sits_out_where_it_makes_others_late(lost: float) -> None:
    choice = choose(CROWDED, crowd(0.7 / FOUR_MS, lost))
    assert choice.active.tolist() == [True] * 4 + [False] * 12
    turned = choose(CROWDED, crowd(0.7 / FOUR_MS, lost)[::-1])
    assert turned.active.tolist() == [False] * 12 + [True] * 4


@pytest.mark.parametrize("lost", [LOST, 9.0])
@pytest.mark.parametrize(
    ("known", "rate"),
    [
        (target_of(0.05, each_ms=0.01), 0.95 / 10.0),  # a row costs next to nothing
        (CROWDED, 0.2 / FOUR_MS),  # they are ahead whoever takes part
        (CROWDED, LOST),
    ],
    ids=["cheap rows", "ahead", "all are lost"],
)
def test_who_cannot_be_saved_takes_part_where_there_is_room(
    known: PerformanceSnapshot, rate: float, lost: float
) -> None:
    assert choose(known, crowd(rate, lost)).active.all()


def test_of_requests_in_need_those_that_need_least_are_served_first() -> None:
    rates = np.linspace(0.5, 3.0, 16) / 40.0
    shuffled = np.random.default_rng(0).permutation(16)
    active = choose(CROWDED, rates[shuffled]).active
    assert 0 < active.sum() < 16
    assert rates[shuffled][active].max() < rates[shuffled][~active].min()


# Eight rows take 10 ms, the ninth is the first that takes 200.
STAIR = snapshot(
    {"small": flat(0.1), "big": TimeCurve(((1, 10.0), (8, 10.0), (9, 200.0), (256, 210.0)))},
    {PAIR: 0.05},
)


@pytest.mark.parametrize(
    ("rate", "waited"),
    [(0.5 / 210.0, 0), (FREE, 0), (LOST, LONGEST_WAIT), (2.0 / 210.0, LONGEST_WAIT)],
    ids=["ahead", "no objectives", "lost but waited", "urgent but waited"],
)
def test_some_take_part_at_any_price(rate: float, waited: int) -> None:
    assert choose(STAIR, [rate] * 16, waited=[waited] * 16).active.all()


def test_who_cannot_be_saved_is_served_at_the_best_price() -> None:
    assert choose(STAIR, [LOST] * 16).active.sum() < 16


# Whoever comes


@st.composite
def situations(draw: st.DrawFn) -> tuple[PerformanceSnapshot, Floats, dict[str, Any]]:
    """Requests of all kinds; no two of those with an objective need the same."""
    count = draw(st.integers(1, 20))
    alpha, each_ms = draw(st.floats(0.05, 0.95)), draw(st.floats(0.01, 3.0))
    known = replace(target_of(alpha, each_ms), machine=draw(st.sampled_from([1.0, 1.3])))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    prompt_tokens = draw(st.sampled_from([0, 0, 20, 200]))
    kinds = rng.uniform([0.01, 0.9, 3.0], [0.9, 3.0, 90.0], (count, 3))
    kinds /= plain_ms(known, count, prompt_tokens)
    shares = draw(st.sampled_from([[1, 1, 1], [0, 1, 1], [0, 1, 3], [0, 3, 0], [3, 1, 0]]))
    weights = np.array([*shares, draw(st.integers(0, 1))]) + 1e-9
    kind = rng.choice(4, count, p=weights / weights.sum())
    rates = np.where(kind == 3, FREE, kinds[np.arange(count), np.minimum(kind, 2)])
    waited = rng.choice([0, 3, LONGEST_WAIT - 1, LONGEST_WAIT], count, p=[0.7, 0.1, 0.1, 0.1])
    others = draw(st.sampled_from([0, 0, 4]))
    return known, rates, {"waited": waited, "prompt_tokens": prompt_tokens, "others": others}


@given(situations())
@settings(deadline=None, max_examples=150)
def test_somebody_always_takes_part_and_whoever_has_waited_long_enough(
    situation: tuple[PerformanceSnapshot, Floats, dict[str, Any]],
) -> None:
    known, rates, beside = situation
    choice = choose(known, rates, **beside)
    assert choice.active.shape == rates.shape
    assert choice.active.any()
    assert choice.active[beside["waited"] >= LONGEST_WAIT].all()
    assert np.isfinite(choice.value)
    assert choice.value > 0.0


@given(situations())
@settings(deadline=None, max_examples=150)
def test_who_is_ahead_of_an_objective_always_takes_part(
    situation: tuple[PerformanceSnapshot, Floats, dict[str, Any]],
) -> None:
    known, rates, beside = situation
    needed = rates * plain_ms(known, len(rates) + beside["others"], beside["prompt_tokens"])
    ahead = (rates > 0.0) & (needed < 0.7)
    assert choose(known, rates, **beside).active[ahead].all()


@given(situations(), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=150)
def test_the_order_of_requests_makes_no_difference(
    situation: tuple[PerformanceSnapshot, Floats, dict[str, Any]], seed: int
) -> None:
    known, rates, beside = situation
    first = choose(known, rates, **beside)
    order = np.random.default_rng(seed).permutation(len(rates))
    turned = choose(known, rates[order], **(beside | {"waited": beside["waited"][order]}))
    assert route(turned) == route(first)
    assert turned.value == pytest.approx(first.value)
    alike = rates[order] == FREE  # of whom any may take part
    assert np.array_equal(turned.active[~alike], first.active[order][~alike])
    assert turned.active.sum() == first.active.sum()


@given(situations(), st.sampled_from([0.5, 2.0, 4.0]))
@settings(deadline=None, max_examples=100)
def test_on_a_slower_machine_requests_that_have_as_much_more_time_are_served_alike(
    situation: tuple[PerformanceSnapshot, Floats, dict[str, Any]], slower: float
) -> None:
    known, rates, beside = situation
    first = choose(known, rates, **beside)
    slow = choose(replace(known, machine=slower * known.machine), rates / slower, **beside)
    assert route(slow) == route(first)
    assert np.array_equal(slow.active, first.active)
    assert slow.value == pytest.approx(first.value / slower)


@given(situations())
@settings(deadline=None, max_examples=100)
def test_an_option_is_one_of_the_grids_and_of_the_cycle_that_it_is_for(
    situation: tuple[PerformanceSnapshot, Floats, dict[str, Any]],
) -> None:
    known, rates, beside = situation
    choice = choose(known, rates, **beside)
    option, active = choice.option, int(choice.active.sum())
    if option is None:
        return
    assert option.chain == PAIR
    assert 1 <= option.nodes <= option.depth * option.width
    assert option.cycle_ms > plain_ms(known, active + beside["others"], beside["prompt_tokens"])
    if option.plain_ms:  # its outcome will be compared with the prediction
        assert active == len(rates)
        assert not beside["prompt_tokens"]


# Cycle after cycle


@pytest.mark.parametrize("rates", [crowd(0.7 / FOUR_MS, LOST), crowd(0.7 / FOUR_MS, 9.0)])
def test_nobody_sits_out_longer_than_the_longest_wait(rates: list[float]) -> None:
    waited, longest, served = np.zeros(16, np.int64), 0, np.zeros(16, np.int64)
    for _ in range(4 * LONGEST_WAIT):
        active = choose(CROWDED, rates, waited=waited.tolist()).active
        waited = np.where(active, 0, waited + 1)
        longest, served = max(longest, int(waited.max())), served + active
    assert longest == LONGEST_WAIT
    assert (served[:4] == 4 * LONGEST_WAIT).all()
    assert (served[4:] >= 3).all()


# Time


def time_of_choice(count: int) -> Timing:
    rng = np.random.default_rng(4)
    known = snapshot(
        {"small": rising(0.5, 0.02), "middle": rising(2.0, 0.05), "big": rising(25.0, 0.3)},
        alpha={("small", "middle"): 0.7, ("middle", "big"): 0.8},
    )
    grid = OptionGrid(TRIPLE, known, Workload(count), Limits())
    assert len(grid.menu.nodes)  # found once for many cycles
    plain = plain_ms(known, count)
    cases = [
        (np.where(rng.random(count) < 0.6, needed / plain, FREE), rng.integers(0, 9, count))
        for needed in rng.uniform(0.0, 4.0, (10, count))
    ]
    return timed(lambda case: choose_cycle(known, grid, *case, 20), cases)


@pytest.mark.timing
@pytest.mark.parametrize(("count", "yardsticks"), [(32, 2.0), (256, 2.0)])
def test_the_choice_takes_a_small_part_of_a_cycle(count: int, yardsticks: float) -> None:
    assert time_of_choice(count).yardsticks < yardsticks


@pytest.mark.timing
@pytest.mark.parametrize("count", CHOICE_MS)
def test_the_choice_takes_as_long_as_is_promised(count: int) -> None:
    assert time_of_choice(count).ms < SLACK * CHOICE_MS[count]


@pytest.mark.parametrize("prompt_tokens", [0, 40, 128, 256])
def test_long_prompts_do_not_switch_off_drafts_that_pay(prompt_tokens: int) -> None:
    known = snapshot({"small": flat(0.1), "big": rising(10.0)}, {PAIR: 0.5})
    grid = OptionGrid(PAIR, known, Workload(4), Limits())
    choice = choose_cycle(known, grid, np.zeros(4), np.zeros(4, np.int64), prompt_tokens)
    assert choice.option is not None
