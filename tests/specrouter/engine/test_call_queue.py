"""Every call is answered once, whatever becomes of it."""

import pytest

from specrouter.engine.call_queue import CallQueue
from specrouter.execution.hang_guard import Abandoned


def test_calls_are_run_in_their_order_and_answered() -> None:
    queue, numbers = CallQueue(), iter(range(3))
    results = [queue.add(lambda: next(numbers)) for _ in range(3)]
    while queue:
        queue.run_next()
    assert [result.result(0) for result in results] == [0, 1, 2]


def test_a_call_that_hangs_is_told_so_by_who_takes_over() -> None:
    queue = CallQueue()

    def hang() -> None:
        queue.give_up(TimeoutError("small hangs"))  # from the thread that takes over
        raise Abandoned("small")

    result, other = queue.add(hang), queue.add(lambda: 5)
    with pytest.raises(Abandoned):
        queue.run_next()
    with pytest.raises(TimeoutError, match="small"):
        result.result(0)
    queue.run_next()
    assert other.result(0) == 5


def test_calls_that_are_never_run_are_told_so() -> None:
    queue = CallQueue()
    results = [queue.add(lambda: 1), queue.add(lambda: 2)]
    queue.close(RuntimeError("closed"))
    assert not queue
    for result in results:
        with pytest.raises(RuntimeError, match="closed"):
            result.result(0)
