"""Times of batches, and their inverses."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from research.sim.roofline import RooflineTime
from specrouter.profile.batch_time import MOST_TOKENS, BatchTime, CurveTime
from tests.specrouter.predictions import flat, rising
from tests.specrouter.slo_machines import OPT_7B, OPT_13B, OPT_30B

coefficients = st.floats(0.0, 100.0)
rooflines = st.lists(st.tuples(coefficients, coefficients, coefficients), min_size=1, max_size=3)


def is_inverse(times: BatchTime, ms: float, steps: int) -> bool:
    found = times.tokens_within(ms, steps)
    fits = found == 0 or times.ms(found, steps) <= ms
    return fits and (found == MOST_TOKENS or times.ms(found + 1, steps) > ms)


@example(RooflineTime(((2.2e-308, 0.0, 1.0),)), 1.0, 0)
@example(RooflineTime(((1e-15, 0.0, 1.0),)), 1.0, 0)
@example(RooflineTime(((0.0, 1.0, 5.551115123125783e-17),)), 1.0, 1)
@given(rooflines.map(tuple).map(RooflineTime), st.floats(0.0, 1e4), st.integers(0, 16))
def test_no_batch_within_a_time_is_larger(times: RooflineTime, ms: float, steps: int) -> None:
    assert is_inverse(times, ms, steps)


def test_a_prompt_of_any_length_takes_as_many_full_batches_as_it_needs() -> None:
    times = CurveTime(rising(10.0), around_ms=2.0, most=36)
    full = times.ms(36)
    for tokens in (1, 36, 37, 72, 100, 1_000_000):
        batches, rest = divmod(tokens - 1, 36)
        assert times.ms(tokens) == pytest.approx(batches * full + times.ms(rest + 1))


@pytest.mark.parametrize(
    ("times", "steps", "within_50", "within_100"),
    [(OPT_7B, 1, 366, 1093), (OPT_13B, 0, 253, 946), (OPT_30B, 0, 130, 666)],
)
def test_published_machines_read_as_many_tokens_as_their_coefficients_say(
    times: RooflineTime, steps: int, within_50: int, within_100: int
) -> None:
    assert times.tokens_within(50.0, steps) == within_50
    assert times.tokens_within(100.0, steps) == within_100


def test_a_curve_adds_drafting_steps_and_the_work_around() -> None:
    times = CurveTime(rising(10.0), step_ms=2.0, around_ms=1.0)
    assert times.ms(21, steps=3) == 10.0 + 20.0 + 6.0 + 1.0
    assert times.tokens_within(37.0, steps=3) == 21
    assert CurveTime(flat(10.0)).tokens_within(10.0) == MOST_TOKENS
    assert CurveTime(flat(10.0)).tokens_within(9.9) == 0
