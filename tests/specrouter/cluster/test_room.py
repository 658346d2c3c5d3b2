"""A cluster is full by what waits at all replicas, and says when the first of them has a row."""

from specrouter.cluster.room import Crowd, crowd
from tests.specrouter.cluster.states import state, view


def test_rows_and_what_is_on_its_way_count() -> None:
    views = [view("a", state(4, 1, retry_after_s=5.0)), view("b", state(4, retry_after_s=2.0))]
    assert crowd(views, None) is None
    assert crowd(views, 2) is None
    assert crowd(views, 1) == Crowd(1, 2.0)
    on_its_way = [views[0], view("b", state(4, retry_after_s=2.0), sent=2)]
    assert crowd(on_its_way, 2) == Crowd(3, 2.0)


def test_free_rows_anywhere_are_room() -> None:
    assert crowd([view("a", state(4, 10)), view("b", state(0))], 1) is None
    full = [view("a", state(4, 10)), view("b", state(3), sent=1)]
    assert crowd(full, 1) == Crowd(10, 0.0)
