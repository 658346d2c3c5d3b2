"""Which times of forwards move a model's curve, and how far."""

import json
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrouter.profile.time_curve import TimeCurve
from specrouter.profile.time_regression import TimeRegression, TimeSample, isotonic
from tests.specrouter.forward_times import SIZES, TARGET, TIMES_MS, jitter, profiled

FORWARDS = st.lists(st.tuples(st.integers(1, 3000), st.floats(0, 1e6), TIMES_MS), max_size=60)


def curve_of(times: TimeRegression) -> TimeCurve:
    found = times.curve()
    assert found is not None
    return found


def serve(times: TimeRegression, count: int, tokens: int, ms: float, attended: float = 0.0) -> None:
    for _ in range(count):
        times.record(tokens, attended, ms)


@given(st.lists(st.tuples(st.floats(0.1, 1e3), st.floats(0.1, 10)), min_size=1, max_size=12))
def test_isotonic_values_do_not_fall_and_keep_the_weighted_mean(
    pairs: list[tuple[float, float]],
) -> None:
    values, weights = map(list, zip(*pairs, strict=True))
    found = isotonic(values, weights)
    assert found == sorted(found)
    assert np.dot(found, weights) == pytest.approx(np.dot(values, weights))


@settings(max_examples=50, deadline=None)
@given(FORWARDS)
def test_a_learned_curve_rises_whatever_was_recorded_and_survives_json(
    forwards: list[tuple[int, float, float]],
) -> None:
    known = TimeRegression.profiled([TimeSample(1, 0.0, 1.0)])
    for tokens, attended, ms in forwards:
        known.record(tokens, attended, ms)
        curve = curve_of(known)  # asserts that its points rise, and the slope's sign
    curve = curve_of(known)
    assert all(math.isfinite(ms) and ms > 0 for _, ms in curve.points)
    again = curve_of(TimeRegression.from_json(json.loads(json.dumps(known.to_json()))))
    assert np.array(again.points) == pytest.approx(np.array(curve.points))
    assert again.slope_ms_per_million == pytest.approx(curve.slope_ms_per_million)


@settings(max_examples=50, deadline=None)
@given(FORWARDS, st.floats(0.01, 100.0))
def test_a_machine_so_many_times_as_slow_has_a_curve_so_many_times_as_high(
    forwards: list[tuple[int, float, float]], factor: float
) -> None:
    one = TimeRegression.profiled([TimeSample(1, 0.0, 1.0)])
    other = TimeRegression.profiled([TimeSample(1, 0.0, factor)])
    for tokens, attended, ms in forwards:
        one.record(tokens, attended, ms)
        other.record(tokens, attended, ms * factor)
    for tokens in SIZES:
        expected = factor * curve_of(one).at(tokens)
        assert curve_of(other).at(tokens) == pytest.approx(expected, rel=1e-3)


def test_a_models_first_two_forwards_of_a_size_do_not_make_its_curve() -> None:
    times = TimeRegression()
    serve(times, 2, 1, 1e4)
    assert (times.curve(), times.knows(1)) == (None, False)
    serve(times, 1, 1, 2.0)
    assert curve_of(times).at(1) == pytest.approx(2.0)


def test_a_size_that_is_truly_slow_is_known_to_be_after_some_forwards() -> None:
    times = profiled(TARGET)
    serve(times, 150, 256, 160.0)  # four times that of half as many
    assert curve_of(times).at(256) == pytest.approx(160.0, rel=0.05)


@pytest.mark.parametrize("ms", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_no_positive_number_is_ignored(ms: float) -> None:
    times, before = profiled(TARGET), curve_of(profiled(TARGET))
    serve(times, 5, 1, ms)
    assert curve_of(times) == before


def test_a_profile_tells_attentions_slope() -> None:
    curve = curve_of(profiled(TARGET))
    assert curve.slope_ms_per_million == pytest.approx(50.0)
    assert [curve.at(n) for n in SIZES] == pytest.approx([TARGET.at(n) for n in SIZES])


@pytest.mark.parametrize("slope", [0.0, 20.0, 200.0])
def test_attentions_slope_is_learned_from_forwards_at_several_contexts(slope: float) -> None:
    true, chance, noise = TimeCurve(TARGET.points, slope), random.Random(0), jitter(0.02)
    times = profiled(TARGET)
    for _ in range(600):
        tokens = chance.choice((1, 8, 64))
        attended = tokens * 128.0 * chance.randint(1, 16)
        times.record(tokens, attended, true.at(tokens, attended) * next(noise))
    assert curve_of(times).slope_ms_per_million == pytest.approx(slope, rel=0.15, abs=8.0)
    assert curve_of(times).at(64, 1e5) == pytest.approx(true.at(64, 1e5), rel=0.06)


def test_one_outlier_moves_what_is_well_known_by_a_hundredth() -> None:
    times = profiled(TARGET)
    serve(times, 100, 8, TARGET.at(8, 1024.0), 1024.0)
    before = curve_of(times).at(8)
    serve(times, 1, 8, 1e6, 1024.0)
    assert curve_of(times).at(8) == pytest.approx(before, rel=0.015)


def test_sizes_that_are_not_visited_follow_near_ones_that_are() -> None:
    times, before = profiled(TARGET), curve_of(profiled(TARGET))
    serve(times, 200, 8, 2.0 * TARGET.at(8))
    risen = [curve_of(times).at(n) / before.at(n) for n in SIZES]
    assert all(1.5 < each < 2.1 for each in risen)


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"format": 1, "slope_ms_per_million": 0.0, "of": []},
        {"format": 2, "slope_ms_per_million": -1.0, "of": []},
        {"format": 2, "slope_ms_per_million": "0", "of": []},
        {"format": 2, "slope_ms_per_million": 0.0, "of": [[5, 1.0]]},
        {"format": 2, "slope_ms_per_million": 0.0, "of": [[4, 0.0]]},
        {"format": 2, "slope_ms_per_million": 0.0, "of": [[4, math.nan]]},
        {"format": 2, "slope_ms_per_million": 0.0, "of": [[4]]},
        {"format": 2, "slope_ms_per_million": 0.0, "of": [[4, 2.0], [6, 1.0]]},
    ],
)
def test_what_was_not_written_by_a_regression_is_refused(data: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        TimeRegression.from_json(data)


def test_what_is_not_finite_is_not_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    times = profiled(TARGET)
    before = curve_of(times)
    with monkeypatch.context() as patch:
        patch.setattr(TimeRegression, "_expected_ms", lambda *_: math.nan)
        with pytest.raises(ArithmeticError):
            serve(times, 3, 16, 14.0)
    assert curve_of(times) == before
    serve(times, 3, 16, 14.0)
    assert curve_of(times) != before


@pytest.mark.parametrize("factor", [0.0, math.inf, math.nan])
def test_a_scale_is_a_positive_number(factor: float) -> None:
    times = profiled(TARGET)
    before = curve_of(times)
    with pytest.raises(ArithmeticError):
        times.scale(factor)
    assert curve_of(times) == before
