"""A view is frozen, and tells of rows what policies ask."""

import dataclasses

import numpy as np

from tests.specrouter.predictions import ALL
from tests.specrouter.slo.test_admission import request, view

ROWS = np.array([4, 1])


def test_requests_stand_by_row_and_models_lack_what_they_lack() -> None:
    running = [
        request(1, row=4, missed={"small": 30}, repeatable=12, slots=128),
        request(2, row=1, missed={"small": 3}, repeatable=12, slots=256),
    ]
    seen = view([], running)
    assert list(seen.by_row) == [1, 4]
    assert seen.slots_of(ROWS).tolist() == [128, 256]
    assert seen.missed("small", ROWS).tolist() == [30, 3]
    assert seen.missed("ngram", ROWS).tolist() == [0, 0]
    assert seen.evaluable("small", ROWS).tolist() == [12, 3]
    cold = dataclasses.replace(seen, loaded=ALL - {"small"})
    assert not cold.evaluable("small", ROWS).any()  # it would have to be loaded first


def test_requests_that_are_admitted_run_in_that_order() -> None:
    seen = view([request(5), request(6), request(7)], [request(1, row=0)])
    after = seen.with_running([request(7, row=2), request(5, row=1)])
    assert [(one.id, one.row) for one in after.running] == [(1, 0), (7, 2), (5, 1)]
    assert [one.id for one in after.waiting] == [6]
    assert [one.id for one in seen.running] == [1], "a view stays as it is"
    assert seen.with_running([]).waiting == seen.waiting
