"""How far admission is believed, by how its promises ended."""

from dataclasses import replace

from specrouter.profile.batch_time import CurveTime
from specrouter.slo.admission import fcfs
from specrouter.slo.serve.policy import MOST_ERROR, by_objectives
from specrouter.slo.serve.promises import Promises
from specrouter.view import NOT_BELIEVED, EngineView
from tests.specrouter.predictions import rising
from tests.specrouter.slo.serve.test_measured_pacing import view
from tests.specrouter.slo.test_admission import request
from tests.specrouter.slo_machines import amortized
from tests.specrouter.views import table

KNOWN_TIMES = CurveTime(rising(50.0, 0.5), 1.0)


def test_nothing_is_believed_before_it_was_kept_and_little_after_it_was_broken() -> None:
    promises = Promises()
    assert promises.error == NOT_BELIEVED
    for _ in range(20):
        promises.note(kept=True)
    assert promises.error < 0.07
    broken = 0
    while promises.error < 0.5:  # from where on admission is first come, first served
        promises.note(kept=False)
        broken += 1
    assert 8 <= broken <= 16


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


def test_what_is_promised_at_first_is_all_that_can_be_kept() -> None:
    """Else a machine whose requests all ask for much would never learn that it can keep it."""
    pacing_of = amortized(KNOWN_TIMES, 100.0, 0.0, 64)
    fastest_ms = pacing_of(view(0)).fastest_ms
    policy = by_objectives(pacing_of, 64, most_error=MOST_ERROR)
    for tpot_ms, promised in ((1.2 * fastest_ms, set()), (1.5 * fastest_ms, {1})):
        asked = replace(request(1, left=20, tpot_ms=tpot_ms, output_tokens=20), arrived_s=10.0)
        found = policy(replace(view(0), waiting=table([asked]), prediction_error=NOT_BELIEVED))
        assert (found.admitted, found.order) == ((1,), "first_come")
        assert found.promised == promised


def test_it_departs_from_first_come_first_served_only_as_far_as_it_is_believed() -> None:
    pacing_of = amortized(KNOWN_TIMES, 100.0, 0.0, 64)
    policy = by_objectives(pacing_of, 64, most_error=MOST_ERROR)
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
        found = by_objectives(pacing_of, 64, most_error=MOST_ERROR)(seen)
        assert found.lost == ((1,) if promised else ())
