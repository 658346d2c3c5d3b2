"""A view is frozen, and its tables say of requests what policies ask."""

import numpy as np

from tests.specrouter.slo.test_admission import request, view
from tests.specrouter.views import by_row, engine_view, entries_of, table


def test_requests_are_taken_by_mask_place_and_row() -> None:
    running = [
        request(1, row=4, unread_by={"small": 30}, slots=128, tpot_ms=20.0),
        request(2, row=1, unread_by={"small": 3, "big": 1}, slots=256, override="off"),
    ]
    seen = table(running)
    assert list(by_row(engine_view(running))) == [1, 4]
    assert seen.by_row().at(np.array([4, 1])).tolist() == [1, 0]
    assert entries_of(seen.take(np.array([False, True]))) == running[1:]
    assert entries_of(seen.take(np.array([1, 0])))[0].unread_by == {"small": 3, "big": 1}
    assert seen.among({2, 7}).tolist() == [False, True]
    assert len(seen.take(np.array([], dtype=np.int64))) == 0
    assert entries_of(seen.joined(seen.take(seen.among({1}))))[2].slots == 128


def test_requests_that_are_admitted_run_in_that_order() -> None:
    seen = view([request(5), request(6), request(7)], [request(1, row=0)])
    after = seen.with_running(table([request(7, row=2), request(5, row=1)]))
    assert [(one.id, one.row) for one in entries_of(after.running)] == [(1, 0), (7, 2), (5, 1)]
    assert after.waiting.id.tolist() == [6]
    assert seen.running.id.tolist() == [1], "a view stays as it is"
    assert seen.with_running(table([])).waiting is seen.waiting
    assert after.without({1, 5}).running.id.tolist() == [7]
