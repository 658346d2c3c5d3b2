"""Stages of an output: refused by the field, found in the tokens, judged by the clock."""

from __future__ import annotations

import math
from typing import Any

import pytest

from specrouter import SLO, RequestError
from specrouter.request.objective import Objective, Stage, joined, resolve
from specrouter.request.pace import attained_stages

END_OF_THINKING = 7
THINKING = Stage(20.0, until_token=END_OF_THINKING)
ANSWER = Stage(50.0)


def refused_field(*stages: Any, **others: Any) -> str:
    with pytest.raises(RequestError) as caught:
        SLO(stages=stages, **others)
    return caught.value.field


BAD_VALUES: dict[str, list[Any]] = {
    "tpot_ms": [0, -1.0, math.nan, math.inf, True, "20", None],
    "until_tokens": [0, -3, 2.0, True, "5"],
    "until_token": [-3, 2.0, True, "</think>"],
}


@pytest.mark.parametrize("field", BAD_VALUES)
def test_a_bad_value_of_a_stage_names_its_place(field: str) -> None:
    for value in BAD_VALUES[field]:
        bad = Stage(**{"tpot_ms": 20.0, field: value})
        assert refused_field(bad, ANSWER) == f"slo.stages[0].{field}"
        assert refused_field(THINKING, bad, ANSWER) == f"slo.stages[1].{field}"


def test_every_stage_but_the_last_ends_somewhere() -> None:
    assert refused_field(ANSWER, ANSWER) == "slo.stages[0]"
    assert refused_field(Stage(20.0, 5, 7), ANSWER) == "slo.stages[0].until_token"
    assert refused_field(THINKING) == "slo.stages[0].until_token"
    assert refused_field(THINKING, Stage(20.0, 5)) == "slo.stages[1].until_tokens"


def test_stages_stand_for_one_tpot() -> None:
    assert refused_field(THINKING, ANSWER, tpot_ms=20) == "slo.tpot_ms"
    assert refused_field(THINKING, ANSWER, tpot_ratio=1.5) == "slo.tpot_ratio"
    assert refused_field("thinking") == "slo.stages[0]"
    with pytest.raises(RequestError) as caught:
        SLO(stages=[ANSWER])  # type: ignore[arg-type]
    assert caught.value.field == "slo.stages"
    asked = SLO(ttft_ms=900, stages=(THINKING, ANSWER))
    with pytest.raises(RequestError) as caught:
        joined(asked, {"tpot_ms": 20.0}, {}, {"tpot_ms": "x-slo-tpot-ms"})
    assert caught.value.field == "x-slo-tpot-ms"


def test_stages_are_kept_when_an_objective_is_joined_and_resolved() -> None:
    asked = joined(SLO(stages=(THINKING, ANSWER)), {"ttft_ms": 9.0}, {}, {"ttft_ms": "--ttft"})
    found = resolve(asked, {}, lambda: 1.0)
    assert found == Objective(
        tpot_ms=None, ttft_ms=9.0, slo_class=None, e2e_ms=None, stages=(THINKING, ANSWER)
    )


def test_each_stage_is_judged_by_the_time_of_its_own_tokens() -> None:
    stages = (THINKING, ANSWER)
    came_ms = [100.0, 120.0, 140.0, 240.0, 290.0]
    assert attained_stages(stages, [3], came_ms) == (True, False)
    assert attained_stages(stages, [2], came_ms) == (True, False)
    assert attained_stages(stages, [4], came_ms) == (False, True)
    assert attained_stages(stages, [], [100.0]) == (True,), "nothing after the first token"
    assert attained_stages((ANSWER,), [], came_ms) == (True,)
