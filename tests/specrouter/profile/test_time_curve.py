"""What T(n) promises."""

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from specrouter.profile.time_curve import TimeCurve
from tests.specrouter.forward_times import curves


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
