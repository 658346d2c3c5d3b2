"""Where forwards are filled up to sizes, T(n) is the time of the size that holds n."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrouter.profile.perf_model import PerfModel
from specrouter.profile.profiler import PerformanceProfiler
from specrouter.profile.staircase import Staircase, filled_size
from specrouter.profile.time_curve import TimeCurve
from tests.specrouter.forward_times import TARGET, curves, profiled

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128)
CURVE = TimeCurve(((1, 4.0), (16, 5.0), (128, 12.0)), 3.0)
sizes = st.lists(st.integers(1, 300), min_size=1, max_size=8).map(lambda n: tuple(sorted(set(n))))


@given(curves(), sizes, st.integers(1, 400), st.floats(0.0, 1e7))
def test_a_forward_takes_the_time_of_the_size_that_holds_it(
    curve: TimeCurve, known: tuple[int, ...], tokens: int, attended: float
) -> None:
    stairs = Staircase(curve, known)
    size = min((one for one in known if one >= tokens), default=tokens)
    assert stairs.at(tokens, attended) == curve.at(size, attended)
    many = stairs.many(np.array([tokens, tokens]), attended)
    assert many.tolist() == curve.many(np.array([size, size], dtype=float), attended).tolist()
    assert stairs.filled(np.array([tokens])).tolist() == [size]
    assert filled_size(tokens, known) == size


@given(
    curves(), sizes, st.floats(0.001, 1e5), st.floats(0.0, 1e6), st.sampled_from([0.0, 1.0, 500.0])
)
def test_the_most_tokens_within_a_time_are_the_most(
    curve: TimeCurve, known: tuple[int, ...], ms: float, attended: float, slots: float
) -> None:
    stairs = Staircase(curve, known)
    most = stairs.tokens_within(ms, attended, slots)
    if math.isinf(most):
        return
    if most:
        assert stairs.at(most, attended + slots * most) <= ms * (1 + 1e-12)
    assert stairs.at(most + 1, attended + slots * (most + 1)) > ms * (1 - 1e-12)


def test_another_speed_keeps_the_sizes() -> None:
    twice = Staircase(CURVE, SIZES).scaled(2.0)
    assert twice == Staircase(CURVE.scaled(2.0), SIZES)
    assert twice.at(9, 1e6) == 2.0 * CURVE.at(16, 1e6)


def test_forwards_count_for_the_size_that_they_were_filled_up_to() -> None:
    """Else forwards over 9 tokens, which take what 16 do, would teach that 9 are slow."""
    plain, sized = PerfModel(), PerfModel()
    plain.learn("big", profiled(TARGET))
    sized.learn("big", profiled(TARGET), SIZES)
    for _ in range(200):
        for known, tokens in ((plain, 16), (sized, 9)):
            known.record("big", tokens, 0.0, 1.5 * TARGET.at(16))
            known.end_cycle()
    stairs = sized.models()["big"]
    assert isinstance(stairs, Staircase)
    assert stairs.curve == plain.models()["big"]
    assert stairs.at(9) == stairs.at(16) == pytest.approx(stairs.curve.at(16))


def test_a_model_that_is_loaded_elsewhere_may_have_no_sizes_any_more() -> None:
    profiler = PerformanceProfiler(parameters={"big": 10})
    profiler.learn_curve("big", profiled(TARGET), SIZES)
    assert isinstance(profiler.snapshot().times["big"], Staircase)
    profiler.learn_curve("big", profiled(TARGET))
    assert isinstance(profiler.snapshot().times["big"], TimeCurve)
