"""Waiting requests leave in the order of their keys, or from anywhere."""

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrouter.engine.admission_queue import AdmissionPace, AdmissionQueue


def queue_of(keys: list[float], asking: Collection[int] = ()) -> tuple[AdmissionQueue, list[Any]]:
    """`asking`: places of those that have an objective."""
    queue = AdmissionQueue()
    requests: list[Any] = [
        SimpleNamespace(
            admission_key=key, has_objective=place in asking, is_declined=False, gave_way=False
        )
        for place, key in enumerate(keys)
    ]
    for request in requests:
        queue.push(request)
    return queue, requests


def drained(queue: AdmissionQueue) -> list[Any]:
    found = []
    while queue:
        [first] = queue.first_of(1)
        queue.remove(first)
        found.append(first)
    return found


def test_what_is_taken_out_is_gone_and_the_others_keep_their_order() -> None:
    queue, requests = queue_of([5.0, 1.0, 4.0, 1.0, 3.0, 2.0, 1.0])
    gone = [requests[1], requests[4]]
    taken = queue.take_out(lambda request: any(request is one for one in gone))
    assert sorted(map(id, taken)) == sorted(map(id, gone))
    left = [requests[index] for index in (3, 6, 5, 2, 0)]
    assert len(queue) == 5
    assert all(one is other for one, other in zip(drained(queue), left, strict=True))


@given(st.lists(st.tuples(st.floats(0, 9), st.booleans(), st.booleans()), max_size=12))
def test_the_queue_knows_whether_anybody_asks(waiting: list[tuple[float, bool, bool]]) -> None:
    """Each with its key, whether it asks, and whether it leaves without a row."""
    keys = [key for key, *_ in waiting]
    asking = {place for place, (_, asks, _) in enumerate(waiting) if asks}
    queue, requests = queue_of(keys, asking)
    leaving = {id(requests[place]) for place, (*_, leaves) in enumerate(waiting) if leaves}
    queue.take_out(lambda request: id(request) in leaving)
    assert queue.has_objectives is any(one.has_objective for one in queue)
    while queue:
        queue.remove(queue.first_of(1)[0])
        assert queue.has_objectives is any(one.has_objective for one in queue)


def test_the_pace_is_that_of_requests_that_end_while_others_wait() -> None:
    pace = AdmissionPace()
    assert pace.seconds_per_request(0.0) is None
    pace.note_end(5.0)
    assert pace.seconds_per_request(10.0) is None
    pace.note_queue(True, 10.0)
    for end_s in (12.0, 12.0, 16.0):
        pace.note_queue(True, end_s - 0.1)
        pace.note_end(end_s)
    assert pace.seconds_per_request(16.0) == pytest.approx(2.0)
    assert pace.seconds_per_request(19.0) == pytest.approx(3.0)  # the next one takes its time


def test_a_quiet_hour_does_not_slow_the_pace() -> None:
    pace = AdmissionPace()
    pace.note_queue(True, 0.0)
    pace.note_end(2.0)
    pace.note_queue(False, 2.1)
    pace.note_end(1000.0)
    for now_s in (3.0, 3600.0):
        assert pace.seconds_per_request(now_s) == pytest.approx(2.0)
    pace.note_queue(True, 3600.0)
    assert pace.seconds_per_request(3601.0) == pytest.approx(3.0)
    pace.note_end(3601.0)
    assert pace.seconds_per_request(3601.0) == pytest.approx(1.5)


def test_the_first_of_a_queue_are_shown_in_order_and_any_may_be_removed() -> None:
    queue, requests = queue_of([5.0, 1.0, 4.0])
    assert queue.first_of(2) == [requests[1], requests[2]]
    assert len(queue.first_of(9)) == 3
    queue.remove(requests[2])
    assert drained(queue) == [requests[1], requests[0]]


def test_many_without_objectives_in_front_do_not_hide_who_has_one() -> None:
    """Else it would wait for all of them before admission is asked about it."""
    queue, requests = queue_of([float(number) for number in range(9)], asking=(1, 4, 5, 7, 8))
    requests[4].is_declined = True
    assert queue.shown(3) == [*requests[:3], requests[5], requests[7]]
    assert queue.shown(9) == requests
    queue.take_out(lambda request: request in requests[5:])
    assert queue.shown(3) == requests[:3]
