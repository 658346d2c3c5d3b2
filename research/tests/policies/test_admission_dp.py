"""The dynamic program against all subsets, and against what an exact execution does of its sets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from research.policies.admission_dp import (
    PromptDemand,
    Room,
    counts_of,
    demands_of,
    most_admitted,
    reads_in_time,
    tier_of,
    tiers_for,
    tiers_of,
)
from research.policies.autoregressive import AutoregressiveBudget, leaves_nobody_late
from research.policies.prefill_budget import PrefillBudget, SpeculativeBudget
from research.sim.roofline import RooflineTime
from research.tests.policies.exact_execution import misses_nothing
from specrouter.slo.serve.load import Load, Prompt, by_deadline
from tests.pure import few
from tests.specrouter.slo_machines import OPT_7B

Case = tuple[list[PromptDemand], Room, AutoregressiveBudget]

# 6 tokens a unit of time, whatever the batch.
SIX_A_UNIT = RooflineTime(((1.0 / 6.0, 0.0, 0.0),))


def subsets(prompts: Sequence[PromptDemand], room: Room) -> Iterator[tuple[int, ...]]:
    """Places of new prompts that memory and rows allow, most first."""
    new = [place for place, prompt in enumerate(prompts) if not prompt.is_running]
    for count in range(min(len(new), room.rows), -1, -1):
        for chosen in combinations(new, count):
            if sum(prompts[place].memory for place in chosen) <= room.memory:
                yield chosen


def kept(prompts: Sequence[PromptDemand], chosen: Sequence[int]) -> list[PromptDemand]:
    return [p for place, p in enumerate(prompts) if p.is_running or place in chosen]


def left_one_by_one(
    prompts: Sequence[PromptDemand], room: Room, budget: PrefillBudget
) -> list[float]:
    """The prefill budget left at each deadline if all are read, one after the other."""
    left, since, found = 0.0, 0.0, list[float]()
    counts = np.array(room.decoding, dtype=np.int64)
    for prompt in prompts:
        if prompt.deadline_ms < since:
            left = -np.inf
        span = np.array(max(0.0, prompt.deadline_ms - since))
        left += float(budget.over(span, counts)) - prompt.tokens
        found.append(left)
        counts[prompt.tier] += 1
        since = prompt.deadline_ms
    return found


def is_feasible(prompts: Sequence[PromptDemand], room: Room, budget: PrefillBudget) -> bool:
    """By PB*, one prompt after the other, and when all decode."""
    counts = np.array(room.decoding)
    for prompt in prompts:
        counts[prompt.tier] += 1
    left = left_one_by_one(prompts, room, budget)
    return all(each >= 0.0 for each in left) and bool(budget.holds(counts))


def best_by_search(
    prompts: Sequence[PromptDemand], room: Room, budget: PrefillBudget
) -> int | None:
    for chosen in subsets(prompts, room):
        if is_feasible(kept(prompts, chosen), room, budget):
            return len(chosen)
    return None


def executes(case: Case, chosen: Sequence[int]) -> bool:
    prompts, room, budget = case
    tiers = budget.tiers_ms
    decoding = [tpot for tpot, n in zip(tiers, room.decoding, strict=True) for _ in range(n)]
    those = [(p.deadline_ms, p.tokens, tiers[p.tier]) for p in kept(prompts, chosen)]
    return misses_nothing(decoding, those, budget.times, budget.idle_ms)


def drawn(draws: np.random.Generator, grid_ms: float | None = None, tiers: int = 2) -> Case:
    """Six prompts at most, running ones among them, memory, and small batches.

    `grid_ms`: deadlines are multiples of it; a request of the tightest tier then decodes, so that
    all batches take one time.
    """
    tight = 10.0
    paces = (tight, 2.0 * tight)[:tiers] if grid_ms else (tight, float(draws.uniform(10.0, 35.0)))
    batch = int(draws.integers(4, 13))  # tokens of a batch of 10 ms
    times = RooflineTime(((8.0 / batch, 0.0, 2.0 - 1e-9),))
    decoding = [int(draws.integers(0, 4)) for _ in paces]
    if grid_ms:
        decoding[0] = max(1, decoding[0])
    prompts = []
    for _ in range(int(draws.integers(1, 7))):
        deadline = float(draws.uniform(0.0, 120.0))
        if grid_ms:
            deadline = grid_ms * int(draws.integers(0, int(120.0 / grid_ms) + 1))
        is_running = bool(draws.random() < 0.15)
        tokens, tier = int(draws.integers(1, 25)), int(draws.integers(0, len(paces)))
        memory = 0 if is_running else int(draws.integers(0, 4))
        prompts.append(PromptDemand(deadline, tokens, tier, memory, is_running))
    prompts.sort(key=lambda prompt: prompt.deadline_ms)
    room = Room(tuple(decoding), int(draws.integers(0, 9)), int(draws.integers(1, 7)))
    idle = tight if grid_ms else max(paces)
    return prompts, room, AutoregressiveBudget(times, paces, idle)


def cases(count: int, seed: int, grid_ms: float | None = None, tiers: int = 2) -> Iterator[Case]:
    draws = np.random.default_rng(seed)
    for _ in range(count):
        yield drawn(draws, grid_ms, tiers)


def test_no_subset_is_larger_and_the_set_is_one_of_them() -> None:
    declining = 0
    for case in cases(few(2500), seed=1):
        found, best = most_admitted(*case), best_by_search(*case)
        assert (found is None) == (best is None)
        if found is None or best is None:
            continue
        prompts, room, budget = case
        assert len(found) == best
        assert sum(prompts[place].memory for place in found) <= room.memory
        assert len(found) <= room.rows
        assert is_feasible(kept(prompts, found), room, budget)
        declining += 0 < best < sum(not prompt.is_running for prompt in prompts)
    assert declining > few(500), "cases that decide nothing"


def test_an_exact_execution_of_the_set_misses_nothing() -> None:
    admitted = 0
    for case in cases(few(2500), seed=3):
        found = most_admitted(*case)
        if found is not None:
            assert executes(case, found)
            admitted += len(found)
    assert admitted > few(2000)


@pytest.mark.parametrize(("tiers", "grid_ms"), [(1, 10.0), (2, 20.0)])
def test_no_exact_execution_serves_more_where_all_times_are_whole_batches(
    tiers: int, grid_ms: float
) -> None:
    """Deadlines and TPOTs are multiples of the time of a batch, deadlines of every TPOT."""
    for case in cases(few(700), 4, grid_ms, tiers):
        prompts, room, _ = case
        found = most_admitted(*case)
        best = next((len(s) for s in subsets(prompts, room) if executes(case, s)), None)
        assert (None if found is None else len(found)) == best


def test_a_prompt_that_was_begun_is_not_left_out_for_newer_ones() -> None:
    budget = AutoregressiveBudget(SIX_A_UNIT, (1.0,), 1.0)
    begun = PromptDemand(3.0, 15, 0, is_running=True)
    new = [PromptDemand(1.0, 2, 0), PromptDemand(2.0, 2, 0), PromptDemand(5.0, 2, 0)]
    prompts = sorted([begun, *new], key=lambda prompt: prompt.deadline_ms)
    found = most_admitted(prompts, Room((0,)), budget)
    assert found is not None
    assert len(found) == 2
    alone = [replace(p, is_running=False) for p in prompts]
    assert len(most_admitted(alone, Room((0,)), budget) or ()) == 3
    assert most_admitted([replace(begun, deadline_ms=2.0)], Room((0,)), budget) is None


@pytest.mark.parametrize("kind", ["autoregressive", "speculative"])
@given(
    paces=st.lists(st.sampled_from([50.0, 100.0]), max_size=300),
    read=st.lists(
        st.tuples(st.floats(-5.0, 900.0), st.integers(1, 1500), st.sampled_from([50.0, 100.0])),
        max_size=6,
    ),
)
def test_a_load_is_in_time_where_each_prompt_after_the_other_is(
    kind: str, paces: list[float], read: list[tuple[float, int, float]]
) -> None:
    def budget_of(tiers: tuple[float, ...]) -> PrefillBudget:
        if kind == "autoregressive":
            return AutoregressiveBudget(OPT_7B, tiers, 100.0)
        return SpeculativeBudget(times=OPT_7B, tiers_ms=tiers, alpha=0.7, idle_ms=100.0)

    due = np.array(paces, dtype=np.float64)
    prompts = [
        Prompt(id=1000 + n, deadline_ms=ms, tokens=tokens, tpot_ms=tpot_ms)
        for n, (ms, tokens, tpot_ms) in enumerate(read)
    ]
    load = Load(
        ids=tuple(range(len(due))), due_ms=due, tpot_ms=due, left=due, prompts=by_deadline(prompts)
    )
    tiers = tiers_for(load, ())
    room = Room(tuple(counts_of(load, tiers)))
    asked = demands_of(load.prompts, tiers)
    assert reads_in_time(load, budget_of) == is_feasible(asked, room, budget_of(tiers))


THREE = Load(
    ids=(1, 2, 3), due_ms=np.ones(3), tpot_ms=np.ones(3), left=np.full(3, 90.0), prompts=()
)


def test_three_prompts_of_figure_3_are_in_time_and_a_fourth_is_not() -> None:
    due = [Prompt(id=10 + n, deadline_ms=6.0, tokens=6, tpot_ms=1.0) for n in range(4)]
    assert leaves_nobody_late(THREE.joined(due[:3]), SIX_A_UNIT, 1.0)
    assert not leaves_nobody_late(THREE.joined(due), SIX_A_UNIT, 1.0)


def test_no_tier_is_looser_than_those_that_it_stands_for() -> None:
    paces = [20.0, 35.0, 50.0, 80.0, 100.0, float("inf")]
    tiers = tiers_of(paces)
    assert len(tiers) <= 4
    assert all(tiers[int(tier_of(tiers, pace))] <= pace for pace in paces)
    assert tiers_of([50.0, 100.0]) == (50.0, 100.0)
