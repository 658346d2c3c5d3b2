"""What a view's requests need: deadlines and paces, of those that can still be on time."""

import math
from dataclasses import replace
from typing import Any

import pytest

from research.policies.strict_pacing import Strict
from specrouter.request.objective import Stage
from specrouter.slo.serve.requests import sorted_requests
from tests.specrouter.slo.test_admission import request, view
from tests.specrouter.slo_machines import OPT_7B

PACING = Strict(OPT_7B, 100.0, 0.0)
FASTEST_MS = PACING.fastest_ms


def test_a_deadline_counts_from_the_arrival_and_the_tightest_stage_counts() -> None:
    stages = (Stage(50.0, 10), Stage(40.0))
    late = replace(request(1, left=99, ttft_ms=900.0, stages=stages), arrived_s=-0.5)
    (prompt,) = sorted_requests(view([late], []), PACING).new
    assert (prompt.deadline_ms, prompt.tokens, prompt.tpot_ms) == (400.0, 100, 40.0)
    gone = replace(late, arrived_s=-0.88)
    asked = sorted_requests(view([gone], []), PACING)
    assert (asked.new, asked.beyond) == ((), (1,))


def test_an_end_to_end_objective_slows_prompt_and_output_by_one_factor() -> None:
    alone_ms = OPT_7B.ms(100) + 19 * OPT_7B.ms(1)
    known = request(1, left=99, e2e_ms=2.0 * alone_ms, output_tokens=20)
    (prompt,) = sorted_requests(view([known], []), PACING).new
    assert prompt.deadline_ms == pytest.approx(2.0 * OPT_7B.ms(100))
    assert prompt.tpot_ms == pytest.approx(2.0 * OPT_7B.ms(1))


def test_a_length_that_nobody_knows_declines_nobody() -> None:
    """Only its first token is held to the objective, until the class has a usual length."""
    e2e_ms = OPT_7B.ms(100) + 30 * OPT_7B.ms(1)
    asked = replace(request(1, left=99, e2e_ms=e2e_ms), max_new_tokens=1024)
    asked = replace(asked, kv_tokens=100 + 1024)
    unknown = sorted_requests(view([asked], []), PACING)
    [prompt] = unknown.new
    assert (prompt.deadline_ms, prompt.tpot_ms, unknown.beyond) == (e2e_ms, math.inf, ())
    short, long = (view([replace(asked, output_tokens=each)], []) for each in (16.0, 40.0))
    [prompt] = sorted_requests(short, PACING).new
    assert FASTEST_MS < prompt.tpot_ms < 3.0 * FASTEST_MS
    assert sorted_requests(long, PACING).beyond == (1,)
    late = replace(asked, e2e_ms=0.9 * OPT_7B.ms(100))
    assert sorted_requests(view([late], []), PACING).beyond == (1,)


def paces(**changes: Any) -> tuple[list[float], list[float], list[float]]:
    """When the next token is due, TPOT from now on, and tokens that are left, of who decodes."""
    running = replace(request(1, left=0, row=0, tpot_ms=50.0, output_tokens=21), **changes)
    load = sorted_requests(view([], [running]), PACING).load
    return load.due_ms.tolist(), load.tpot_ms.tolist(), load.left.tolist()


def test_where_runs_of_ten_are_judged_a_run_that_is_late_is_made_good_by_its_end() -> None:
    on_time = {"decoded": 13, "run_ms": 150.0}
    assert paces(**on_time) == ([50.0], [50.0], [7.0])
    assert paces(**{**on_time, "run_ms": 170.0}) == ([30.0], [50.0], [7.0])
    due, tpot, _ = paces(**{**on_time, "run_ms": 220.0})
    assert due == tpot == [pytest.approx((500.0 - 220.0) / 7)]
    assert paces(**{**on_time, "run_ms": 400.0}) == ([], [], [])


def test_else_what_was_lost_or_gained_is_spread_over_what_is_left() -> None:
    for decode_ms in (0.0, 250.0, 400.0):
        due, tpot, left = paces(decoded=5, decode_ms=decode_ms)
        assert left == [15.0]
        assert due == tpot == [pytest.approx((20 * 50.0 - decode_ms) / 15)]
    lost = replace(request(1, left=0, row=0, tpot_ms=50.0), decoded=5, decode_ms=9000.0)
    asked = sorted_requests(view([], [lost]), PACING)
    assert asked.best_effort.id.tolist() == [1]


def test_what_the_fastest_machine_cannot_make_good_is_lost() -> None:
    behind = replace(
        request(1, left=0, row=0, tpot_ms=50.0, output_tokens=21), decoded=5, decode_ms=700.0
    )
    assert sorted_requests(view([], [behind]), PACING).load.ids == ()
    assert sorted_requests(view([], [behind]), Strict(OPT_7B, 100.0, 0.7)).load.ids == (1,)


def test_a_stage_is_made_good_within_itself() -> None:
    stages = (Stage(50.0, 12), Stage(100.0))
    due, tpot, left = paces(stages=stages, decoded=4, decode_ms=280.0)
    assert left == [8.0]
    assert due == tpot == [pytest.approx((12 * 50.0 - 280.0) / 8)]


def test_a_first_token_that_has_come_is_asked_for_no_more() -> None:
    """Be it that its request has lost its row since, or that the first token came late."""
    done = replace(request(1, left=99, ttft_ms=20_000.0), decoded=9, decode_ms=90.0)
    asked = sorted_requests(view([done], []), PACING)
    assert (asked.new, asked.beyond, asked.waiting.id.tolist()) == ((), (), [1])
    paced = replace(done, ttft_ms=100.0, tpot_ms=50.0, output_tokens=100, arrived_s=-1.0)
    (prompt,) = sorted_requests(view([paced], []), PACING).new
    assert prompt.can_wait
    reading = replace(paced, row=0)
    (prompt,) = sorted_requests(view([], [reading]), PACING).load.prompts
    assert prompt.can_wait


def test_a_promise_of_a_first_token_that_came_is_not_lost_and_one_of_a_pace_may_be() -> None:
    had = replace(
        request(1, left=0, ttft_ms=9_000.0, row=0), decoded=5, decode_ms=50.0, promised=True
    )
    assert sorted_requests(view([], [had]), PACING).lost == ()
    slow = replace(had, tpot_ms=FASTEST_MS, decode_ms=1e6, output_tokens=20)
    assert sorted_requests(view([], [slow]), PACING).lost == (1,)
    untold = replace(slow, promised=False)
    assert sorted_requests(view([], [untold]), PACING).lost == ()


def test_an_implied_ttft_is_a_deadline_that_nobody_is_too_late_for() -> None:
    asked = replace(request(1, left=99, tpot_ms=50.0), implied_ttft_ms=2_000.0)
    needs_ms = OPT_7B.ms(100)
    for waited_s, deadline_ms, can_wait in (
        (0.5, 1_500.0, True),
        (3.0, 2.0 * needs_ms, True),
        (4.1, 2.0 * needs_ms, False),
    ):
        seen = replace(view([replace(asked, arrived_s=0.0)], []), now_s=waited_s)
        (prompt,) = sorted_requests(seen, PACING).new
        assert prompt.deadline_ms == pytest.approx(deadline_ms)
        assert (prompt.is_soft, prompt.can_wait) == (True, can_wait)


def test_who_is_late_is_judged_by_the_stage_that_runs_and_paced_by_the_tightest() -> None:
    stages = (Stage(100.0, 20), Stage(45.0))
    due, tpot, _ = paces(stages=stages, decoded=10, decode_ms=900.0)
    assert due == tpot == [45.0]
    due, tpot, left = paces(stages=stages, decoded=10, decode_ms=1600.0)
    assert due == tpot == [pytest.approx((20 * 100.0 - 1600.0) / left[0])]
    assert paces(stages=stages, decoded=10, decode_ms=1900.0) == ([], [], [])


def test_a_latency_that_has_been_waited_for_is_shared_anew() -> None:
    alone_ms = OPT_7B.ms(100) + 19 * OPT_7B.ms(1)
    asked = request(1, left=99, e2e_ms=3.0 * alone_ms, output_tokens=20)
    waited = replace(asked, arrived_s=-alone_ms / 1000)
    (prompt,) = sorted_requests(view([waited], []), PACING).new
    assert prompt.deadline_ms == pytest.approx(2.0 * OPT_7B.ms(100))
    assert prompt.tpot_ms == pytest.approx(2.0 * OPT_7B.ms(1))
    gone = replace(asked, arrived_s=-2.1 * alone_ms / 1000)
    assert sorted_requests(view([gone], []), PACING).beyond == (1,)
    decoding = replace(waited, unread=0, row=0, decoded=9, remaining=10, decode_ms=alone_ms / 2)
    (pace,) = sorted_requests(view([], [decoding]), PACING).load.tpot_ms
    assert pace == pytest.approx(2.0 * alone_ms / 10)
    # In its second stage, of which it has 3 tokens, taken in a quarter of that time.
    stages = (Stage(1e4),)
    staged = replace(decoding, stages=stages, decoded=3, decode_ms=alone_ms / 4)
    (pace,) = sorted_requests(view([], [staged]), PACING).load.tpot_ms
    assert pace == pytest.approx((2.0 + 0.25) * alone_ms / 13)
