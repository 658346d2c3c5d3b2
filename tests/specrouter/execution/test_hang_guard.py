"""When a forward counts as one that does not return."""

from specrouter.execution.hang_guard import HangGuard


def test_a_forward_is_overdue_only_after_its_time_and_only_while_it_lasts() -> None:
    now = [0.0]
    guard = HangGuard(5.0, clock=lambda: now[0])
    assert guard.overdue() is None
    with guard.inside("small"):
        now[0] = 4.9
        assert guard.overdue() is None
        now[0] = 5.0
        assert guard.overdue() == "small"
    assert guard.overdue() is None
