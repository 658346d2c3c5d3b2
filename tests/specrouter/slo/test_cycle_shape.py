"""Who takes part in a cycle, and with which drafts. A pass takes 10 ms and one more per token."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrouter.profile.cycle_times import Workload
from specrouter.profile.prediction import OptionGrid, ShapeLimits
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.slo.cycle_shape import LONGEST_WAIT, Beside, CycleChoice, choose_cycle
from tests.specrouter.predictions import PAIR, flat, rising, snapshot

FREE, LOST = 0.0, np.inf  # without an objective; with one that nothing can attain


def target_of(alpha: float, each_ms: float = 1.0, draft_ms: float = 0.1) -> PerformanceSnapshot:
    return snapshot({"small": flat(draft_ms), "big": rising(10.0, each_ms)}, {PAIR: alpha})


def choose(
    known: PerformanceSnapshot,
    rates: Sequence[float],
    waited: Sequence[int] | None = None,
    beside: Beside = Beside(),  # noqa: B008
) -> CycleChoice:
    cycles = np.zeros(len(rates), np.int64) if waited is None else np.array(waited)
    grid = OptionGrid(PAIR, known, Workload(requests=len(rates)), ShapeLimits())
    return choose_cycle(known, grid, np.array(rates, float), cycles, beside)


REQUESTS = st.lists(st.sampled_from([FREE, 0.005, 0.02, 0.05, 0.1, 0.3, LOST]), min_size=1)
MACHINES = st.builds(target_of, st.floats(0.1, 0.95), st.floats(0.01, 2.0), st.floats(0.01, 4.0))


@settings(max_examples=60)
@given(known=MACHINES, rates=REQUESTS)
def test_without_an_objective_nobody_waits_and_nobody_is_slower_than_without_drafts(
    known: PerformanceSnapshot, rates: list[float]
) -> None:
    found = choose(known, rates)
    assert found.active[np.array(rates) == FREE].all()
    assert found.active.any()
    if FREE in rates and found.option is not None:
        plain_ms = known.times["big"].at(len(rates))
        assert found.option.tokens / found.option.cycle_ms >= 1.0 / plain_ms - 1e-9


@settings(max_examples=30)
@given(known=MACHINES, rates=REQUESTS)
def test_who_waited_long_enough_takes_part(known: PerformanceSnapshot, rates: list[float]) -> None:
    assert choose(known, rates, [LONGEST_WAIT] * len(rates)).active.all()


@settings(max_examples=30)
@given(
    known=MACHINES,
    rates=st.lists(st.floats(0.0, 0.5), min_size=2, max_size=12, unique=True),
    seed=st.integers(0, 99),
)
def test_the_order_of_requests_does_not_matter(
    known: PerformanceSnapshot, rates: list[float], seed: int
) -> None:
    turn = np.random.default_rng(seed).permutation(len(rates))
    first, turned = choose(known, rates), choose(known, [rates[at] for at in turn])
    assert turned.active.tolist() == first.active[turn].tolist()
    assert turned.option == first.option


def test_who_cannot_attain_the_objective_any_more_yields_to_those_who_can() -> None:
    found = choose(target_of(0.5), [0.05] * 6 + [LOST] * 6)
    assert found.active.tolist() == [True] * 6 + [False] * 6


def test_where_nobody_can_be_saved_all_are_served() -> None:
    assert choose(target_of(0.8, each_ms=0.1), [LOST] * 6).active.all()


def test_drafts_that_texts_must_be_read_for_cost_that_time() -> None:
    rates = [0.02] * 4
    assert choose(target_of(0.6, 0.1), rates).option is not None
    assert choose(target_of(0.6, 0.1), rates, None, Beside(catch_up_ms=100.0)).option is None


@pytest.mark.parametrize("others", [0, 8])
def test_the_predicted_time_is_that_of_the_cycle(others: int) -> None:
    known = target_of(0.8, 0.1)
    found = choose(known, [0.05] * 4, None, Beside(others=others)).option
    assert found is not None
    assert found.cycle_ms == pytest.approx(
        found.levels_ms + known.times["big"].at(4 + others + 4 * found.shape.nodes)
    )
