"""What admission learns from its promises: a margin of every TPOT, and how far to be believed."""

from dataclasses import replace

import numpy as np
import pytest

from specrouter.profile.batch_time import CurveTime
from specrouter.request.objective import Objective, Stage
from specrouter.request.output import RequestMetrics
from specrouter.slo.admission import fcfs
from specrouter.slo.serve.policy import by_objectives
from specrouter.slo.serve.promises import Promises
from specrouter.view import LEAST_PACE_MARGIN, NOT_BELIEVED, EngineView
from tests.specrouter.predictions import rising
from tests.specrouter.slo.serve.test_measured_pacing import view
from tests.specrouter.slo.test_admission import request
from tests.specrouter.slo_machines import amortized
from tests.specrouter.views import table

MOST = 0.25
KNOWN_TIMES = CurveTime(rising(50.0, 0.5), 1.0)


def margin_after(share_missed: float, ended: int = 4_000) -> float:
    margin, drawn = Promises(), np.random.default_rng(0).random(ended)
    for each in drawn:
        kept = bool(each >= share_missed)
        margin.note(kept=kept, kept_pace=kept)
    return margin.pace_margin


def test_who_keeps_all_promises_keeps_back_little_and_who_breaks_many_keeps_back_most() -> None:
    assert margin_after(0.0) == LEAST_PACE_MARGIN
    assert margin_after(0.01) < 0.15
    assert margin_after(0.2) == pytest.approx(MOST, abs=0.05)


def test_where_a_larger_margin_brings_fewer_misses_it_finds_the_one_where_few_miss() -> None:
    """Misses fall from 40% at a margin of 0.1 to none at 0.22."""
    margin, draws = Promises(), np.random.default_rng(1)
    seen = []
    for each in draws.random(6_000):
        kept = bool(each >= 0.4 * (1.0 - (margin.pace_margin - 0.1) / 0.12))
        margin.note(kept=kept, kept_pace=kept)
        seen.append(margin.pace_margin)
    assert np.mean(seen[1_000:]) == pytest.approx(0.1 + 0.12 * (1 - 1 / 21 / 0.4), abs=0.02)


def test_a_margin_that_lets_nobody_in_narrows_until_somebody_is_promised_again() -> None:
    """Every request asks for 1.2 times what the machine does alone, which is idle."""
    times, margin, declined = CurveTime(rising(10.0, 0.5), 1.0), Promises(MOST), 0
    pacing_of = amortized(times, 20.0, 0.7, 64)
    tpot_ms = 1.2 * pacing_of(view(0)).fastest_ms
    policy = by_objectives(pacing_of, 64)
    while True:
        asked = replace(request(1, left=20, tpot_ms=tpot_ms, output_tokens=20), arrived_s=10.0)
        found = policy(replace(view(0), waiting=table([asked]), pace_margin=margin.pace_margin))
        assert found.admitted == (1,), "it is served at once, promised or not"
        if found.promised:
            break
        assert (found.declined, found.held_back) == ((1,), 1)
        margin.note_held_back(found.held_back)
        declined += 1
    assert margin.pace_margin == pytest.approx(1.0 - 1.0 / 1.2, abs=0.002)
    assert declined < 200


def test_who_asks_for_more_than_the_machine_can_do_says_nothing_of_the_margin() -> None:
    pacing_of = amortized(KNOWN_TIMES, 20.0, 0.7, 64)
    asked = request(1, left=20, tpot_ms=0.9 * pacing_of(view(0)).fastest_ms, output_tokens=20)
    found = by_objectives(pacing_of, 64)(replace(view(0), waiting=table([asked])))
    assert (found.declined, found.held_back) == ((1,), 0)


def test_nothing_is_believed_before_it_was_kept_and_little_after_it_was_broken() -> None:
    promises = Promises()
    assert promises.error == NOT_BELIEVED
    for _ in range(20):
        promises.note(kept=True, kept_pace=None)
    assert promises.error < 0.07
    broken = 0
    while promises.error < 0.5:  # from where on admission is first come, first served
        promises.note(kept=False, kept_pace=False)
        broken += 1
    assert 8 <= broken <= 16
    assert promises.pace_margin > LEAST_PACE_MARGIN, "it was the pace that was not kept"


def crowd(error: float) -> EngineView:
    """Twelve requests decode at a pace that is just possible, and as many come."""
    tpot_ms = 2.6 * KNOWN_TIMES.ms(1)
    running = tuple(
        request(
            each,
            left=0,
            row=each,
            tpot_ms=tpot_ms,
            output_tokens=100,
            decoded=40,
            decode_ms=40 * tpot_ms,
        )
        for each in range(12)
    )
    waiting = tuple(
        replace(request(each, left=400, tpot_ms=tpot_ms, ttft_ms=900.0), arrived_s=10.0)
        for each in range(20, 32)
    )
    return replace(
        view(0),
        running=table(running),
        waiting=table(waiting),
        free_rows=20,
        prediction_error=error,
    )


def test_it_departs_from_first_come_first_served_only_as_far_as_it_is_believed() -> None:
    pacing_of = amortized(KNOWN_TIMES, 100.0, 0.0, 64)
    policy = by_objectives(pacing_of, 64, never_behind=True)
    as_they_came, strictly = fcfs(64), by_objectives(pacing_of, 64)
    for error in (NOT_BELIEVED, 0.5):
        found, plain = policy(crowd(error)), as_they_came(crowd(error))
        assert (found.admitted, found.chunks, found.order) == (
            plain.admitted, plain.chunks, "first_come"
        )  # fmt: skip
        assert (found.preempted, found.paused, found.budget_ms) == ((), frozenset(), None)
    believed = policy(crowd(0.05))
    assert believed.order == "objectives"
    assert believed.admitted == strictly(crowd(0.05)).admitted
    assert len(believed.admitted) < len(as_they_came(crowd(0.05)).admitted)
    assert "as they came" in believed.why


def test_who_was_promised_a_pace_and_has_lost_it_is_told_at_once() -> None:
    pacing_of = amortized(KNOWN_TIMES, 100.0, 0.0, 64)
    tpot_ms = 1.5 * KNOWN_TIMES.ms(1)
    late = request(
        1, left=0, row=0, tpot_ms=tpot_ms, output_tokens=50, decoded=45, decode_ms=90 * tpot_ms
    )
    for promised in (True, False):
        seen = replace(view(0), running=table([replace(late, promised=promised)]))
        found = by_objectives(pacing_of, 64, never_behind=True)(seen)
        assert found.lost == ((1,) if promised else ())


def metrics(tpot_ms: float | None, asked: Objective | None, *stages: bool) -> RequestMetrics:
    return RequestMetrics(
        ttft_ms=5.0,
        tpot_ms=tpot_ms,
        acceptance_length=2.0,
        cycles=4,
        chains={},
        prompt_tokens=3,
        output_tokens=8,
        objective=asked,
        attained_stages=stages,
    )


def test_a_pace_is_kept_whatever_became_of_the_first_token() -> None:
    asked = Objective(tpot_ms=20.0, ttft_ms=1.0)  # which 5 ms have missed
    assert metrics(19.0, asked).kept_pace is True
    assert metrics(20.0, asked).kept_pace is True
    assert metrics(21.0, asked).kept_pace is False
    assert metrics(None, asked).kept_pace is None
    assert metrics(19.0, None).kept_pace is None
    assert metrics(19.0, Objective(tpot_ms=None, ttft_ms=1.0)).kept_pace is None
    staged = Objective(
        tpot_ms=None, ttft_ms=None, stages=(Stage(10.0, until_tokens=2), Stage(30.0))
    )
    assert metrics(19.0, staged, True, True).kept_pace is True
    assert metrics(19.0, staged, False, True).kept_pace is False
