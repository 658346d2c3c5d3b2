"""What admission decided is told request by request, with its reason, and the last 256 are kept."""

import json
import time
from types import SimpleNamespace
from typing import Any

from specrouter.engine.admission_log import AdmissionLog
from specrouter.request.objective import Objective
from specrouter.request.output import Feasible

CHAT = Objective(tpot_ms=50.0, ttft_ms=400.0, slo_class="chat")


def request(number: int, objective: Objective | None = CHAT, **state: Any) -> Any:
    usual = {
        "preemptions": 0,
        "is_declined": False,
        "finished": False,
        "feasible": None,
        "is_promised": False,
        "gave_way": False,
    }
    handle = SimpleNamespace(request_id=number, log_extra={"request_id": f"http-{number}"})
    times = {"submitted_s": time.perf_counter() - 1.0}
    return SimpleNamespace(handle=handle, objective=objective, **{**usual, **times, **state})


def outcomes(log: AdmissionLog) -> list[tuple[int | None, str]]:
    return [(record.request, record.outcome) for record in log.records]


def test_who_is_promised_its_objective_is_told() -> None:
    log = AdmissionLog()
    log.note(7, 3, [request(1, is_promised=True)], [], [])
    [record] = log.records
    assert (record.cycle, record.running) == (7, 3)
    assert (record.outcome, record.slo_class, record.objective) == ("admitted", "chat", CHAT)
    assert record.reason == "its objective can be attained"
    assert 1000 <= record.waited_ms < 60_000
    assert abs(record.unix_s - time.time()) < 60


def test_who_is_declined_is_served_later_or_rejected_with_what_is_feasible() -> None:
    log = AdmissionLog()
    feasible = Feasible(ttft_ms=900.0)
    late = request(1, is_declined=True)
    log.note(1, 4, [], [late, request(2, finished=True, feasible=feasible)], [])
    log.note(2, 4, [late], [], [])
    assert outcomes(log) == [(1, "declined"), (2, "rejected"), (1, "best_effort")]
    assert [record.feasible for record in log.records] == [None, feasible, None]


def test_who_loses_a_row_is_told_for_whom_and_when_it_goes_on() -> None:
    log = AdmissionLog()
    victim = request(1, None, preemptions=1)
    log.note(1, 2, [request(5, is_promised=True), request(6, is_promised=True)], [], [victim])
    log.note(2, 2, [victim], [], [])
    assert outcomes(log) == [(1, "preempted"), (5, "admitted"), (6, "admitted"), (1, "resumed")]
    assert log.records[0].reason.endswith("requests 5, 6")
    assert log.records[0].slo_class == "none"


def test_who_gives_its_memory_up_is_told() -> None:
    log = AdmissionLog()
    log.note(3, 2, [], [], [request(1, gave_way=True)])
    [record] = log.records
    assert record.outcome == "preempted"
    assert "memory" in record.reason


def test_who_is_given_a_row_in_order_of_arrival_is_not_told_of() -> None:
    log = AdmissionLog()
    log.note(1, 2, [request(1), request(2, None)], [], [])
    assert log.records == []


def test_the_last_256_are_kept_and_can_be_sent() -> None:
    log = AdmissionLog()
    for number in range(300):
        log.note(number, 1, [request(number, is_promised=True)], [], [])
    assert [record.request for record in log.records] == list(range(44, 300))
    sent = json.loads(json.dumps(log.records[-1].to_json()))
    assert sent["request_id"] == "http-299"
    assert sent["objective"]["ttft_ms"] == 400.0
    assert sent["outcome"] == "admitted"


def test_a_change_of_the_order_that_is_followed_is_told_with_its_reason() -> None:
    log = AdmissionLog()
    log.note_order(9, 4, "objectives", "5 by objectives, 3 as they came")
    [record] = log.records
    assert (record.cycle, record.running, record.outcome) == (9, 4, "objectives")
    assert (record.request, record.slo_class) == (None, None)
    assert record.to_json()["reason"] == "5 by objectives, 3 as they came"
