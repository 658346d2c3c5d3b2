"""What T(n) promises, also where forwards are filled up to sizes."""

import math
from dataclasses import replace

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from specrouter.profile.perf_model import PerfModel
from specrouter.profile.profiler import PerformanceProfiler
from specrouter.profile.time_curve import TimeCurve, filled_size
from tests.specrouter.forward_times import TARGET, curves, profiled


@given(curves(), st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0, 1e7), st.floats(0, 1e7))
def test_neither_more_tokens_nor_more_attention_take_less_time(
    curve: TimeCurve, n: float, m: float, a: float, b: float
) -> None:
    assert curve.at(min(n, m), min(a, b)) <= curve.at(max(n, m), max(a, b))


@given(curves(), st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e7)), max_size=20))
def test_many_times_at_once_are_those_of_one_at_a_time(
    curve: TimeCurve, forwards: list[tuple[float, float]]
) -> None:
    tokens, attended = np.array(forwards).reshape(-1, 2).T
    expected = [curve.at(n, a) for n, a in forwards]
    assert curve.many(tokens, attended).tolist() == expected


def test_a_curve_goes_through_its_points_and_on_as_between_the_last_two() -> None:
    curve = TimeCurve(((2, 10.0), (4, 20.0), (8, 22.0)), slope_ms_per_million=3.0)
    assert [curve.at(n) for n in (1, 2, 3, 4, 6, 8, 16)] == [10, 10, 15, 20, 21, 22, 26]
    assert curve.at(3, 2e6) == 15 + 6
    assert TimeCurve(((4, 5.0),)).at(100) == 5.0


@given(curves(), st.floats(0.0, 1e5), st.floats(0.0, 1e7), st.floats(0.0, 1e5))
def test_the_tokens_within_a_time_are_the_most_that_take_no_longer(
    curve: TimeCurve, ms: float, attended: float, slots: float
) -> None:
    tokens = curve.tokens_within(ms, attended, slots)
    assume(tokens < 1e9)

    def takes(count: float) -> float:
        return curve.at(count, attended + slots * count)

    assert tokens == int(tokens)
    assert takes(tokens) <= ms * (1 + 1e-9) or tokens == 0
    assert takes(tokens + 1) > ms * (1 - 1e-9) or curve.at(0, attended) > ms


SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128)
CURVE = TimeCurve(((1, 4.0), (16, 5.0), (128, 12.0)), 3.0)
sizes = st.lists(st.integers(1, 300), min_size=1, max_size=8).map(lambda n: tuple(sorted(set(n))))


@given(curves(), sizes, st.integers(1, 400), st.floats(0.0, 1e7))
def test_a_forward_takes_the_time_of_the_size_that_holds_it(
    curve: TimeCurve, known: tuple[int, ...], tokens: int, attended: float
) -> None:
    stairs = replace(curve, sizes=known)
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
    stairs = replace(curve, sizes=known)
    most = stairs.tokens_within(ms, attended, slots)
    if math.isinf(most):
        return
    if most:
        assert stairs.at(most, attended + slots * most) <= ms * (1 + 1e-12)
    assert stairs.at(most + 1, attended + slots * (most + 1)) > ms * (1 - 1e-12)


def test_another_speed_keeps_the_sizes() -> None:
    twice = replace(CURVE, sizes=SIZES).scaled(2.0)
    assert twice == replace(CURVE.scaled(2.0), sizes=SIZES)
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
    assert stairs == replace(plain.models()["big"], sizes=SIZES)
    assert stairs.at(9) == stairs.at(16)


def test_a_model_that_is_loaded_elsewhere_may_have_no_sizes_any_more() -> None:
    profiler = PerformanceProfiler(parameters={"big": 10})
    profiler.learn_curve("big", profiled(TARGET), SIZES)
    assert profiler.snapshot().times["big"].sizes == SIZES
    profiler.learn_curve("big", profiled(TARGET))
    assert profiler.snapshot().times["big"].sizes == ()
