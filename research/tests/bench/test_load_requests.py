"""Requests of a point: the same for every policy, with objectives as times what is taken alone."""

from dataclasses import replace
from pathlib import Path

import pytest

from research.bench.load_requests import Alone, Point, RequestSource
from research.bench.options import LoadOptions
from research.bench.traces import Arrival

OPTIONS = LoadOptions(config=Path("x.yaml"), poisson=1.0, ttft_slowdown=3.0, e2e_ms=500.0, seed=7)
POINT = Point(1.0, (Arrival(0.0, "coding", 4, 8, 1.5), Arrival(0.5, "coding", 10, 8, None)))
ALONE = Alone(20.0, ((2, 10.0), (12, 110.0)))


def source(options: LoadOptions = OPTIONS) -> RequestSource:
    return RequestSource(lambda text: list(text.encode()), {"code": ["abcdefghijkl"]}, options)


def test_a_prompts_time_alone_lies_on_the_line_through_what_was_measured() -> None:
    assert [ALONE.ttft_ms(tokens) for tokens in (2, 7, 12, 50)] == [10.0, 60.0, 110.0, 110.0]
    assert Alone(20.0).ttft_ms(7) is None


def test_objectives_are_times_what_is_taken_alone() -> None:
    first, second = source().requests(POINT, 0, ALONE)
    assert (first.objective_ms, second.objective_ms) == (30.0, None)
    assert (first.ttft_ms, second.ttft_ms) == pytest.approx((3 * 30.0, 3 * 90.0))
    assert {one.e2e_ms for one in (first, second)} == {500.0}
    without = replace(OPTIONS, ttft_slowdown=None, e2e_ms=None)
    assert [one.ttft_ms for one in source(without).requests(POINT, 0, ALONE)] == [None, None]


def test_nobody_has_an_objective_before_anything_was_measured() -> None:
    assert not any(one.has_objective for one in source().requests(POINT, 0, None))


def test_a_round_has_seeds_of_its_own_and_the_same_prompts() -> None:
    first, again, other = (source().requests(POINT, number, ALONE) for number in (0, 0, 1))
    assert first == again
    assert [one.token_ids for one in first] == [one.token_ids for one in other]
    assert not {one.seed for one in first} & {one.seed for one in other}
