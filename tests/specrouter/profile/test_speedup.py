"""How much faster drafting is: an interval that holds, rest where it is slower, and little lost.

Drafters are planted: what they cost and how many of their tokens are accepted is known. The router
that asks the meter always drafts where it may, as one whose predictions are wrong."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from specrouter.profile.speedup import BLOCK, RUN, SpeedupMeter, summary

ALONE_MS = 12.0
PLANTED_CYCLES = 200_000


@dataclass(frozen=True)
class Drafter:
    """`accepted`: tokens of a cycle, in the mean; `cost`: of its time, over the target's alone."""

    accepted: float
    cost: float

    @property
    def speedup(self) -> float:
        return (1.0 + self.accepted) / (1.0 + self.cost)


GOOD, USELESS, SLOW = Drafter(0.6, 0.1), Drafter(0.0, 0.05), Drafter(0.0, 0.15)
# Drafters, and the share of all cycles from which on each drafts.
PLANTED: dict[str, Sequence[tuple[float, Drafter]]] = {
    "good": [(0.0, GOOD)],
    "useless": [(0.0, USELESS)],
    "turning bad": [(0.0, GOOD), (0.4, SLOW)],
    "neither": [(0.0, Drafter(0.1, 0.1))],
}


def test_one_cycle_in_a_hundred_runs_without_drafts_in_runs() -> None:
    meter = SpeedupMeter()
    drafts = [_asked(meter, 1, GOOD) for _ in range(20 * BLOCK)]
    changes = np.flatnonzero(np.diff(np.array([True, *drafts], dtype=np.int8)))
    assert drafts.count(False) == 20 * RUN
    assert (changes[1::2] - changes[::2] == RUN).all()
    places = changes[::2] % BLOCK
    assert len(set(places.tolist())) > 10  # they are random


def test_cycles_are_compared_with_those_of_as_many_requests() -> None:
    meter, requests = SpeedupMeter(), 0
    for cycle in range(12 * BLOCK):
        drafts = meter.drafts(8)
        # Without drafts fewer requests run: to ask how fast each cycle was would mislead.
        requests = 5 if not drafts or cycle % 2 else 8
        ms = ALONE_MS * requests * (0.8 if drafts else 1.0) * (1.0 + 0.001 * (cycle % 7))
        meter.record(requests, drafts, drafts, requests, ms)
    found = meter.speedups[8]
    assert found.ratio == pytest.approx(1.25, rel=0.01)
    assert found.low <= 1.25 <= found.high


def test_drafting_rests_where_it_is_slower_and_is_tried_again_ever_more_seldom() -> None:
    meter, rested = SpeedupMeter(), list[int]()
    was_drafting = True
    for cycle in range(160 * BLOCK):
        rests = meter.resting(1) is not None
        if rests and was_drafting:
            rested.append(cycle)
        was_drafting = not rests
        assert not (_asked(meter, 1, SLOW) and rests)
    assert meter.drafts(2)  # another load
    first, second, third = rested[:3]
    assert third - second > 1.8 * (second - first) > 25 * BLOCK
    [(load, found)] = meter.speedups.items()
    assert load == 1
    assert found.is_resting
    assert found.high < 1.0
    assert summary(meter.speedups) == f"off at 1 request ({found})"


def test_cycles_in_which_nothing_was_drafted_say_nothing() -> None:
    meter = SpeedupMeter()
    for _ in range(20 * BLOCK):  # to look for drafts costs time
        meter.record(1, meter.drafts(1), False, 1, ALONE_MS * (1.1 if meter.drafts(1) else 1.0))
    assert not meter.speedups
    assert meter.resting(1) is None


def test_what_has_changed_is_forgotten() -> None:
    meter = SpeedupMeter()
    draws = np.random.default_rng(1)
    for _ in range(60 * BLOCK):
        _asked(meter, 1, Drafter(0.2, 0.1), draws)
    for _ in range(15 * BLOCK):
        _asked(meter, 1, Drafter(1.2, 0.1), draws)
    found = meter.speedups[1]
    assert found.low <= 2.0 <= found.high


@pytest.mark.long
@pytest.mark.parametrize("planted", PLANTED)
def test_little_is_lost_and_intervals_hold(planted: str) -> None:
    runs = [_planted(PLANTED[planted], seed) for seed in range(100)]
    assert np.mean([lost for lost, _ in runs]) < 0.01
    assert sum(holds for _, holds in runs) >= 95


def _asked(
    meter: SpeedupMeter, requests: int, drafter: Drafter, draws: np.random.Generator | None = None
) -> bool:
    """One cycle. Without `draws`, all take what they take in the mean, nearly."""
    drafts = meter.drafts(requests)
    noise = 1.0 if draws is None else math.exp(0.03 * draws.standard_normal())
    ms = ALONE_MS * (1.0 + drafter.cost if drafts else 1.0) * noise
    gained = drafter.accepted if draws is None else float(draws.poisson(drafter.accepted))
    meter.record(requests, drafts, drafts, requests * (1.0 + gained if drafts else 1.0), ms)
    return drafts


def _planted(drafters: Sequence[tuple[float, Drafter]], seed: int) -> tuple[float, bool]:
    """The share of time that was lost against the better of drafting and not drafting, and whether
    the last interval holds the truth.

    The machine drifts, its neighbours take bursts of cycles, and texts differ in what is accepted.
    """
    draws, cycles = np.random.default_rng(seed), PLANTED_CYCLES
    machine = _machine(draws, cycles)
    kinds = np.repeat(draws.uniform(0.5, 1.5, cycles // 100), 100)
    which = np.searchsorted([start for start, _ in drafters], np.arange(cycles) / cycles, "right")
    accepted = np.array([one.accepted for _, one in drafters])[which - 1]
    gained = draws.binomial(4, accepted * kinds / 4)
    cost = np.array([one.cost for _, one in drafters])[which - 1]
    speedup = np.array([one.speedup for _, one in drafters])[which - 1]
    meter, taken = SpeedupMeter(), np.zeros(cycles, dtype=np.bool_)
    for cycle in range(cycles):
        meter.resting(1)
        taken[cycle] = drafts = meter.drafts(1)
        ms = ALONE_MS * machine[cycle]
        if drafts:
            meter.record(1, True, True, 1 + int(gained[cycle]), ms * (1.0 + cost[cycle]))
        else:
            meter.record(1, False, False, 1, ms)
    best, used = np.maximum(speedup, 1.0), np.where(taken, speedup, 1.0)
    lost = 1.0 - float(np.mean(used / best))
    found = meter.speedups[1]
    return lost, bool(found.low <= speedup[-1] <= found.high)


def _machine(draws: np.random.Generator, cycles: int) -> np.ndarray:
    drift, at = np.empty(cycles), 0.0
    for cycle, step in enumerate(draws.standard_normal(cycles)):
        drift[cycle] = at = 0.999 * at + 0.045 * step
    burst = np.zeros(cycles)
    for start in np.flatnonzero(draws.random(cycles) < 0.0005):
        burst[start : start + int(draws.integers(5, 60))] = draws.uniform(0.2, 1.5)
    jitter = 0.03 * draws.standard_normal(cycles)
    return np.exp(0.05 * drift + jitter) * (1.0 + burst)
