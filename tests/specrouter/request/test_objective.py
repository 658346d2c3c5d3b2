"""An objective is refused by its field, resolved once, and judged by the clock's rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from specrouter import SLO, RequestError
from specrouter.request.objective import (
    Objective,
    SloLike,
    Stage,
    joined,
    resolve,
    with_implied_ttft,
)

CLASSES = {"interactive": SLO(tpot_ms=50, ttft_ms=1000), "coding": SLO(tpot_ratio=1.2)}
SPELLING = {"tpot_ms": "--tpot", "ttft_ms": "--ttft", "e2e_ms": "--e2e"}


def no_baseline() -> float:
    raise AssertionError("nobody asked for a ratio")


def refused(make: Callable[[], Any]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        make()
    return caught.value


# What is refused


@pytest.mark.parametrize("field", ["tpot_ms", "ttft_ms", "e2e_ms", "tpot_ratio"])
def test_a_quantity_that_is_no_positive_number_is_refused_by_its_name(field: str) -> None:
    values: tuple[Any, ...] = (0, -0.5, math.nan, math.inf, 10**400, True, "50", [50], b"50")
    for value in values:
        assert refused(partial(SLO, **{field: value})).field == f"slo.{field}"


def test_an_objective_asks_for_something_and_for_tpot_in_one_way() -> None:
    for make in (SLO, lambda: SLO(slo_class="coding")):
        assert refused(make).field == "slo"
    assert refused(lambda: SLO(tpot_ms=50, tpot_ratio=1.2)).field == "slo.tpot_ratio"


@pytest.mark.parametrize("choice", ["", "refuse", None, True, 503, ["reject"]])
def test_what_becomes_of_the_unattainable_is_one_of_two(choice: Any) -> None:
    error = refused(lambda: SLO(tpot_ms=50, on_unattainable=choice))
    assert error.field == "slo.on_unattainable"
    assert "best_effort or reject" in error.reason


def test_an_unknown_class_is_refused_with_the_known_ones() -> None:
    error = refused(lambda: resolve("urgent", CLASSES, no_baseline))
    assert error.field == "slo"
    assert "'urgent'" in error.reason
    assert "interactive, coding" in error.reason
    assert "there are none" in refused(lambda: resolve("urgent", {}, no_baseline)).reason
    counted = SLO(tpot_ms=5, slo_class="urgent")
    assert refused(lambda: resolve(counted, CLASSES, no_baseline)).field == "slo"


# What it means


@pytest.mark.parametrize(
    ("slo", "objective"),
    [
        (None, None),
        (SLO(tpot_ms=50), Objective(tpot_ms=50.0, ttft_ms=None)),
        (SLO(e2e_ms=5000), Objective(tpot_ms=None, ttft_ms=None, e2e_ms=5000.0)),
        ("interactive", Objective(tpot_ms=50.0, ttft_ms=1000.0, slo_class="interactive")),
        (
            SLO(tpot_ms=7, slo_class="coding"),
            Objective(tpot_ms=7.0, ttft_ms=None, slo_class="coding"),
        ),
        (
            SLO(tpot_ms=50, on_unattainable="reject"),
            Objective(tpot_ms=50.0, ttft_ms=None, on_unattainable="reject"),
        ),
    ],
)
def test_milliseconds_are_taken_as_they_are(slo: SloLike, objective: Objective | None) -> None:
    assert resolve(slo, CLASSES, no_baseline) == objective


def test_a_ratio_is_times_the_baseline_latency() -> None:
    assert resolve("coding", CLASSES, lambda: 30.0) == Objective(
        tpot_ms=36.0, ttft_ms=None, slo_class="coding"
    )
    asked = SLO(tpot_ratio=2, ttft_ms=100)
    assert resolve(asked, {}, lambda: 30.0) == Objective(tpot_ms=60.0, ttft_ms=100.0)


@pytest.mark.parametrize(("ratio", "baseline_ms"), [(1e308, 30.0), (5e-324, 0.1), (1, 0.0)])
def test_a_ratio_that_the_baseline_makes_meaningless_is_refused(
    ratio: float, baseline_ms: float
) -> None:
    error = refused(lambda: resolve(SLO(tpot_ratio=ratio), {}, lambda: baseline_ms))
    assert error.field == "slo.tpot_ratio"


# Two ways in


@pytest.mark.parametrize(
    ("slo", "added", "result"),
    [
        (None, {}, None),
        ("coding", {}, "coding"),
        (None, {"tpot_ms": 5.0}, SLO(tpot_ms=5.0)),
        (SLO(tpot_ms=5), {"e2e_ms": 5000.0}, SLO(tpot_ms=5, e2e_ms=5000.0)),
        (SLO(tpot_ms=5), {"tpot_ms": 5.0}, SLO(tpot_ms=5)),
        (
            SLO(tpot_ms=5, on_unattainable="reject"),
            {"ttft_ms": 9.0},
            SLO(tpot_ms=5, ttft_ms=9.0, on_unattainable="reject"),
        ),
        ("coding", {"ttft_ms": 9.0}, SLO(ttft_ms=9.0, tpot_ratio=1.2, slo_class="coding")),
    ],
)
def test_what_is_left_open_may_be_added(
    slo: SloLike, added: dict[str, float], result: SloLike
) -> None:
    assert joined(slo, added, CLASSES, SPELLING) == result


@pytest.mark.parametrize(
    ("slo", "added", "field"),
    [
        (SLO(tpot_ms=5), {"tpot_ms": 6.0}, "--tpot"),
        (SLO(tpot_ms=5, ttft_ms=9), {"tpot_ms": 5.0, "ttft_ms": 8.0}, "--ttft"),
        ("interactive", {"ttft_ms": 999.0}, "--ttft"),
        ("coding", {"tpot_ms": 36.0}, "--tpot"),
        ("urgent", {"tpot_ms": 36.0}, "slo"),
        ("urgent", {}, "slo"),
        (None, {"tpot_ms": math.nan}, "--tpot"),
        (SLO(tpot_ms=5), {"ttft_ms": 0.0}, "--ttft"),
    ],
)
def test_what_is_added_must_not_contradict(
    slo: SloLike, added: dict[str, float], field: str
) -> None:
    assert refused(lambda: joined(slo, added, CLASSES, SPELLING)).field == field


# Whether it was given

TPOT, TTFT, BOTH = (
    Objective(tpot_ms=50.0, ttft_ms=None),
    Objective(tpot_ms=None, ttft_ms=100.0),
    Objective(tpot_ms=50.0, ttft_ms=100.0),
)
E2E = Objective(tpot_ms=None, ttft_ms=None, e2e_ms=5000.0)
ALL = Objective(tpot_ms=50.0, ttft_ms=1000.0, e2e_ms=1400.0)


@pytest.mark.parametrize(
    ("objective", "ttft_ms", "decode_ms", "decoded_tokens", "attained"),
    [
        (TPOT, 1e9, 200.0, 4, True),  # for each token after the first
        (TPOT, 1e9, 200.1, 4, False),
        (TPOT, 1e9, 0.0, 0, True),
        (TPOT, 1e9, 50.0, 0, False),
        (TTFT, 100.0, 1e9, 1, True),
        (TTFT, 100.1, 1e9, 1, False),
        (TTFT, None, 1e9, 1, False),
        (BOTH, 100.0, 40.0, 1, True),
        (BOTH, 100.1, 40.0, 1, False),
        (E2E, 100.0, 4900.0, 10, True),  # first token and decoding together
        (E2E, 100.0, 4900.1, 10, False),
        (E2E, None, 0.0, 10, False),
        (ALL, 1000.0, 400.0, 8, True),
        (ALL, 1000.1, 399.0, 8, False),
        (ALL, 1000.0, 400.1, 9, False),
    ],
)
def test_all_that_an_objective_asks_for_must_be_attained(
    objective: Objective,
    ttft_ms: float | None,
    decode_ms: float,
    decoded_tokens: int,
    attained: bool,
) -> None:
    assert objective.is_attained(ttft_ms, decode_ms, decoded_tokens) == attained


# What is implied


@pytest.mark.parametrize(
    ("asked", "prompt_ms", "implied_ms"),
    [
        (Objective(tpot_ms=40.0, ttft_ms=None), 100.0, 2000.0),
        (Objective(tpot_ms=40.0, ttft_ms=None), 1000.0, 5000.0),
        (Objective(tpot_ms=None, ttft_ms=None, stages=(Stage(40.0),)), 100.0, 2000.0),
        (Objective(tpot_ms=40.0, ttft_ms=9000.0), 100.0, None),
        (Objective(tpot_ms=40.0, ttft_ms=None, e2e_ms=9000.0), 100.0, None),
    ],
)
def test_a_tpot_alone_implies_a_ttft(
    asked: Objective, prompt_ms: float, implied_ms: float | None
) -> None:
    found = with_implied_ttft(asked, prompt_ms)
    assert found.implied_ttft_ms == implied_ms
    assert found.is_attained(1e9, 40.0, 1) == asked.is_attained(1e9, 40.0, 1), "it is not judged"
