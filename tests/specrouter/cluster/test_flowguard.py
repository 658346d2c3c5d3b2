"""StreamServe's score of workers: Equations 1 to 4, Algorithm 2, by values found by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrouter.cluster.flowguard import OVERLOAD, WEIGHTS, WorkerMetrics, overload, ranked, score

SHARES = st.floats(0.0, 1.0)
WORKERS = st.lists(st.builds(WorkerMetrics, SHARES, SHARES, SHARES, SHARES), min_size=1, max_size=6)


def test_the_published_weights_and_bound() -> None:
    assert (WEIGHTS, OVERLOAD) == ((0.4, 0.1, 0.3, 0.2), 0.85)


def test_score_and_overload_of_a_worker() -> None:
    worker = WorkerMetrics(cache=0.5, memory=0.5, queue=0.1, load=0.3)
    assert score(worker) == pytest.approx(0.20 + 0.05 + 0.27 + 0.14)
    assert overload(worker) == pytest.approx(0.70)
    assert ranked([worker]) == [0]


def test_a_queue_of_a_fifth_beside_half_the_memory_is_overload() -> None:
    worker = WorkerMetrics(cache=0.5, memory=0.5, queue=0.2, load=0.3)
    assert overload(worker) == pytest.approx(0.90)
    other = WorkerMetrics(cache=0.0, memory=0.8, queue=0.0, load=1.0)
    assert ranked([worker, other]) == [1]


def test_where_all_are_overloaded_the_shortest_queue_is_first() -> None:
    queues = (0.6, 0.5, 0.9, 0.5)
    workers = [WorkerMetrics(cache=1.0, memory=0.0, queue=each, load=0.0) for each in queues]
    assert ranked(workers) == [1, 3, 0, 2]


@given(WORKERS)
def test_nobody_who_is_overloaded_is_ranked_beside_somebody_who_is_not(
    workers: list[WorkerMetrics],
) -> None:
    places = ranked(workers)
    over = {place for place, worker in enumerate(workers) if overload(worker) > OVERLOAD}
    if len(over) == len(workers):
        assert sorted(places) == list(range(len(workers)))
    else:
        assert set(places) == set(range(len(workers))) - over
        scores = [score(workers[place]) for place in places]
        assert scores == sorted(scores, reverse=True)
