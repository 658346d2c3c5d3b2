"""How far an output is in its stages is told as its tokens come, as it is judged afterwards."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specrouter.request.objective import Stage
from specrouter.request.pace import Pace
from tests.specrouter.request.stage_ends import stage_ends

END = 7
THINKING, ANSWER = Stage(20.0, until_token=END), Stage(50.0)


def test_stages_of_an_earlier_attempt_are_over() -> None:
    pace = Pace((THINKING, Stage(30.0, until_tokens=3), ANSWER), before=[1, END, 3])
    assert (pace.stages_before, len(pace.stages), pace.ends) == (1, 2, ())
    pace.take([1, END, 3, 4], 1.0)
    assert (pace.decoded, pace.ends) == (0, ())
    pace.take([1, END, 3, 4, 5, 6], 2.0)
    assert (pace.stages, pace.ends) == ((ANSWER,), (2,))
    assert pace.decoded == 1


@pytest.mark.parametrize("arrivals", [[(1.0, 2)], [(1.0, 2), (2.0, 3), (3.0, 1)]])
@pytest.mark.parametrize("stages", [(), (THINKING, ANSWER)])
def test_an_output_that_came_from_elsewhere_is_where_it_was(
    stages: tuple[Stage, ...], arrivals: list[tuple[float, int]]
) -> None:
    tokens = [1, 2, END, 4, 5, 6][: sum(count for _, count in arrivals)]
    asked: Any = SimpleNamespace(
        objective=SimpleNamespace(stages=stages) if stages else None, generated=tuple(tokens)
    )
    moved, stayed, came = Pace.of(asked, arrivals), Pace(stages), 0
    for came_s, count in arrivals:
        came += count
        stayed.take(tokens[:came], came_s)
    assert (moved.decoded, moved.ends, moved.stages) == (stayed.decoded, stayed.ends, stayed.stages)
    assert moved.decode_ms(9.0) == stayed.decode_ms(9.0)


@pytest.mark.parametrize("seed", range(40))
def test_ends_are_found_whatever_comes_together(seed: int) -> None:
    draws = np.random.default_rng(seed)
    ends = [
        {"until_token": END}
        if draws.random() < 0.5
        else {"until_tokens": int(draws.integers(1, 9))}
        for _ in range(3)
    ]
    stages = (*(Stage(20.0, **each) for each in ends), ANSWER)
    tokens = draws.integers(0, 12, 40).tolist()
    pace, there = Pace(stages), 0
    while there < len(tokens):
        there += int(draws.integers(1, 5))
        pace.take(tokens[:there], float(there))
        expected = stage_ends(stages, tokens[:there])
        assert pace.ends == expected
        assert pace.stages == stages[len(expected) :]
        assert pace.decoded == len(tokens[:there]) - (max(1, expected[-1]) if expected else 1)


def test_the_last_draft_that_there_was_is_known() -> None:
    pace = Pace(())
    pace.take([1], 0.0)
    assert (pace.drafts, pace.acceptance) == (0, 0.0)
    pace.take([1, 2, 3, 4], 1.0, drafted=4, accepted=2)
    pace.take([1, 2, 3, 4, 5], 2.0)
    assert (pace.drafts, pace.acceptance) == (1, 0.5)
    pace.take(list(range(9)), 3.0, drafted=2, accepted=3)
    assert (pace.drafts, pace.acceptance) == (2, 1.0), "verifiers may lengthen a path"
