"""What a view's requests need: deadlines and paces, of those that can still be on time."""

from dataclasses import replace

import pytest

from specrouter.request.objective import Stage
from specrouter.slo.serve.requests import sorted_requests
from tests.specrouter.slo.test_admission import request, view
from tests.specrouter.slo_machines import OPT_7B


def test_a_deadline_counts_from_the_arrival_and_the_tightest_stage_counts() -> None:
    stages = (Stage(50.0, 10), Stage(40.0))
    late = replace(request(1, left=99, ttft_ms=900.0, stages=stages), arrived_s=-0.5)
    (prompt,) = sorted_requests(view([late], []), OPT_7B).new
    assert (prompt.deadline_ms, prompt.tokens, prompt.tpot_ms) == (400.0, 100, 40.0)
    gone = replace(late, arrived_s=-0.88)
    asked = sorted_requests(view([gone], []), OPT_7B)
    assert (asked.new, asked.beyond) == ((), (1,))


def test_an_end_to_end_objective_slows_prompt_and_output_by_one_factor() -> None:
    alone_ms = OPT_7B.ms(100) + 19 * OPT_7B.ms(1)
    known = request(1, left=100, e2e_ms=2.0 * alone_ms, output_tokens=20, reserve_tokens=120)
    (prompt,) = sorted_requests(view([known], []), OPT_7B).new
    assert prompt.deadline_ms == pytest.approx(2.0 * OPT_7B.ms(100))
    assert prompt.tpot_ms == pytest.approx(2.0 * OPT_7B.ms(1))


def test_who_fell_behind_has_its_tpot_strengthened() -> None:
    behind = request(1, left=0, row=0, tpot_ms=50.0, decoded=3, decode_ms=190.0)
    load = sorted_requests(view([], [behind]), OPT_7B).load
    assert load.tpot_ms.tolist() == [46.0]
    on_time = replace(behind, decode_ms=150.0)
    assert sorted_requests(view([], [on_time]), OPT_7B).load.due_ms.tolist() == [50.0]
    lost = replace(behind, decode_ms=2000.0)
    assert [each.id for each in sorted_requests(view([], [lost]), OPT_7B).best_effort] == [1]
