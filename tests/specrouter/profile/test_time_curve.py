"""What T(n) promises, and which times of forwards move it."""

import json
import math
import random
import timeit

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrouter.profile.time_curve import (
    TimeCurve,
    TimeEstimator,
    TimeSample,
    bucket_of,
    isotonic,
)
from tests.specrouter.forward_times import SIZES, TARGET, jitter, profiled

times = st.floats(0.01, 1e4)
points = st.lists(st.tuples(st.integers(1, 500), times), min_size=1, max_size=8).map(
    lambda pairs: tuple(
        zip(
            map(float, sorted({n for n, _ in pairs})),
            sorted(ms for _, ms in dict(pairs).items()),
            strict=True,
        )
    )
)
curves = st.builds(TimeCurve, points, st.floats(0.0, 1e3))


def warm() -> TimeEstimator:
    return TimeEstimator.profiled([TimeSample(1, 0.0, 1.0)])


def curve_of(times: TimeEstimator) -> TimeCurve:
    found = times.curve()
    assert found is not None
    return found


@given(curves, st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0, 1e7), st.floats(0, 1e7))
def test_neither_more_tokens_nor_more_attention_take_less_time(
    curve: TimeCurve, n: float, m: float, a: float, b: float
) -> None:
    assert curve.at(min(n, m), min(a, b)) <= curve.at(max(n, m), max(a, b))


@given(curves, st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e7)), max_size=20))
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


def test_a_scaled_curve_is_of_something_that_takes_so_many_times_as_long() -> None:
    assert TARGET.scaled(0.1).at(20, 1e5) == pytest.approx(0.1 * TARGET.at(20, 1e5))


def test_a_look_at_a_curve_takes_less_than_3_microseconds() -> None:
    assert min(timeit.repeat(lambda: TARGET.at(10, 1e3), number=1000, repeat=5)) < 3e-3


def test_sizes_are_put_to_the_nearest_bucket_in_proportion() -> None:
    sizes = {n: bucket_of(n) for n in (0, 1, 2, 3, 4, 5, 7, 9, 10, 14, 27, 28, 200, 230, 1000)}
    assert list(sizes.values()) == [1, 1, 2, 3, 4, 6, 8, 8, 12, 16, 24, 32, 192, 256, 1024]


@given(st.lists(st.tuples(st.floats(0.1, 1e3), st.floats(0.1, 10)), min_size=1, max_size=12))
def test_isotonic_values_do_not_fall_and_keep_the_weighted_mean(
    pairs: list[tuple[float, float]],
) -> None:
    values, weights = map(list, zip(*pairs, strict=True))
    found = isotonic(values, weights)
    assert found == sorted(found)
    assert np.dot(found, weights) == pytest.approx(np.dot(values, weights))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 300), st.floats(0, 1e6), times), max_size=60))
def test_a_learned_curve_rises_whatever_was_recorded(
    forwards: list[tuple[int, float, float]],
) -> None:
    known = warm()
    for tokens, attended, ms in forwards:
        known.record(tokens, attended, ms)
        curve = curve_of(known)  # asserts that its points rise
    assert curve_of(known).slope_ms_per_million >= 0.0
    assert all(math.isfinite(ms) and ms > 0 for _, ms in curve_of(known).points)
    restored = TimeEstimator.from_json(json.loads(json.dumps(known.to_json())))
    curve = curve_of(restored)
    assert len(curve.points) == len(curve_of(known).points)


def test_a_models_first_two_forwards_do_not_count() -> None:
    times = TimeEstimator()
    for _ in range(2):
        assert times.is_cold
        times.record(1, 0.0, 1e4)
    assert (times.is_cold, times.curve()) == (False, None)
    times.record(1, 0.0, 2.0)
    assert curve_of(times).at(1) == pytest.approx(2.0)


def test_of_the_first_three_times_the_least_counts() -> None:
    times = warm()
    for ms, known in ((60.0, 60.0), (10.0, 10.0), (30.0, 10.0)):
        times.record(64, 0.0, ms)
        assert curve_of(times).at(64) == pytest.approx(known)


def first_of(times: TimeEstimator, tokens: int, ms: float) -> TimeCurve:
    times.record(tokens, 0.0, ms)
    return curve_of(times)


@pytest.mark.parametrize("tokens", [3, 24, 100, 256])
def test_a_first_forward_that_is_far_too_slow_says_no_more_than_its_neighbours_allow(
    tokens: int,
) -> None:
    before = curve_of(profiled(TARGET))
    assert first_of(profiled(TARGET), tokens, 1e4).at(tokens) <= 2.5 * before.at(tokens)
    small = first_of(profiled(TARGET), tokens, 0.8 * before.at(tokens))
    assert small.at(tokens) <= before.at(tokens)


def test_a_size_that_is_truly_slow_is_known_to_be_after_some_forwards() -> None:
    times = profiled(TARGET)
    for _ in range(60):
        times.record(256, 0.0, 160.0)  # four times that of half as many
    assert curve_of(times).at(256) == pytest.approx(160.0, rel=0.05)


def test_a_size_that_was_slow_once_is_forgotten_when_nobody_comes_back() -> None:
    times, before = profiled(TARGET), curve_of(profiled(TARGET))
    assert first_of(times, 256, 1e4).at(256) > 1.2 * before.at(256)
    for _ in range(600):
        times.record(8, 1024.0, TARGET.at(8, 1024.0))
    assert curve_of(times).at(256) == pytest.approx(before.at(256), rel=0.01)


def test_a_time_that_is_no_positive_number_is_ignored() -> None:
    times, before = warm(), curve_of(warm())
    for ms in (0.0, -1.0, math.nan, math.inf):
        times.record(1, 0.0, ms)
    assert curve_of(times) == before


def test_a_curve_is_built_once_per_record() -> None:
    times = warm()
    assert times.curve() is times.curve()


def test_a_forward_counts_as_if_it_had_been_of_its_buckets_size() -> None:
    known = profiled(TARGET)
    for _ in range(100):
        for tokens in (54, 58, 70, 76):  # all nearer to 64 than to a neighbour
            known.record(tokens, tokens * 128.0, TARGET.at(tokens, tokens * 128.0))
    assert curve_of(known).at(64) == pytest.approx(TARGET.at(64), rel=0.005)


def test_a_profile_tells_attentions_slope() -> None:
    curve = curve_of(profiled(TARGET))
    assert curve.slope_ms_per_million == pytest.approx(50.0)
    assert [curve.at(n) for n in SIZES] == pytest.approx([TARGET.at(n) for n in SIZES])


def test_no_size_of_a_profile_takes_longer_than_a_larger_one() -> None:
    samples = [TimeSample(n, 0.0, ms) for n, ms in ((1, 2.0), (4, 9.0), (16, 3.0), (64, 7.0))]
    curve = curve_of(TimeEstimator.profiled(samples))
    assert [curve.at(n) for n in (1, 4, 16, 64)] == pytest.approx([2.0, 3.0, 3.0, 7.0])


@pytest.mark.parametrize("slope", [0.0, 20.0, 200.0])
def test_attentions_slope_is_learned_from_forwards_at_several_contexts(slope: float) -> None:
    true, chance, noise = TimeCurve(TARGET.points, slope), random.Random(0), jitter(0.02)
    times = profiled(TARGET)
    for _ in range(600):
        tokens = chance.choice((1, 8, 64))
        attended = tokens * 128.0 * chance.randint(1, 16)
        times.record(tokens, attended, true.at(tokens, attended) * next(noise))
    assert curve_of(times).slope_ms_per_million == pytest.approx(slope, rel=0.15, abs=4.0)
    assert curve_of(times).at(64, 1e5) == pytest.approx(true.at(64, 1e5), rel=0.06)


def test_one_outlier_moves_a_curve_by_a_hundredth() -> None:
    times = profiled(TARGET)
    for _ in range(20):
        times.record(8, 1024.0, TARGET.at(8, 1024.0))
    before = curve_of(times).at(8)
    times.record(8, 1024.0, 1e6)
    assert curve_of(times).at(8) == pytest.approx(before, rel=0.011)


def test_buckets_that_are_not_visited_follow_those_that_are() -> None:
    times = profiled(TARGET)
    for _ in range(200):
        times.record(8, 1024.0, 2.0 * TARGET.at(8, 1024.0))
    curve = curve_of(times)
    for tokens in SIZES:
        assert curve.at(tokens, tokens * 128.0) == pytest.approx(
            2.0 * TARGET.at(tokens, tokens * 128.0), rel=0.05
        )


def test_buckets_that_are_visited_do_not_follow_their_neighbours() -> None:
    times = profiled(TARGET)
    for _ in range(200):
        times.record(2, 256.0, TARGET.at(2, 256.0))
        times.record(64, 8192.0, 2.0 * TARGET.at(64, 8192.0))
    assert curve_of(times).at(2) == pytest.approx(TARGET.at(2), rel=0.01)
    assert curve_of(times).at(64, 8192.0) == pytest.approx(2 * TARGET.at(64, 8192.0), rel=0.05)


def test_times_survive_json_and_are_those_of_a_cold_model_again() -> None:
    times = profiled(TARGET)
    for _ in range(50):
        times.record(8, 1024.0, 1.2 * TARGET.at(8, 1024.0))
    restored = TimeEstimator.from_json(json.loads(json.dumps(times.to_json())))
    assert restored.is_cold
    known, again = curve_of(times), curve_of(restored)
    assert again.slope_ms_per_million == pytest.approx(known.slope_ms_per_million)
    # The curve in use may be some forwards old.
    assert [again.at(n) for n in SIZES] == pytest.approx([known.at(n) for n in SIZES], rel=0.04)


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"format": 0, "slope_ms_per_million": 0.0, "of": []},
        {"format": 1, "slope_ms_per_million": -1.0, "of": []},
        {"format": 1, "slope_ms_per_million": "0", "of": []},
        {"format": 1, "slope_ms_per_million": 0.0, "of": [[5, 1.0, 0.0, 1.0]]},
        {"format": 1, "slope_ms_per_million": 0.0, "of": [[4, 0.0, 0.0, 1.0]]},
        {"format": 1, "slope_ms_per_million": 0.0, "of": [[4, math.nan, 0.0, 1.0]]},
        {"format": 1, "slope_ms_per_million": 0.0, "of": [[4, 1.0]]},
    ],
)
def test_what_is_no_estimator_is_refused(data: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        TimeEstimator.from_json(data)
