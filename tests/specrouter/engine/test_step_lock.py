"""One thread at a time, and nobody waits for one that was left behind."""

import threading
from contextlib import AbstractContextManager

from specrouter.engine.step_lock import StepLock
from tests.specrouter.faults import PATIENCE_S, wait_until

SOON_S = 0.05


class Visitor:
    """A thread that takes its turn, or whatever `around` is, and leaves when it is told to."""

    def __init__(self, around: AbstractContextManager[None]) -> None:
        self._around = around
        self._inside, self._may_leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._visit, daemon=True)
        self._thread.start()

    def is_inside(self, within_s: float = PATIENCE_S) -> bool:
        return self._inside.wait(within_s)

    def leave(self) -> None:
        self._may_leave.set()
        self._thread.join(PATIENCE_S)

    def _visit(self) -> None:
        with self._around:
            self._inside.set()
            self._may_leave.wait(PATIENCE_S)


def test_one_waits_for_the_other() -> None:
    turn = StepLock()
    first = Visitor(turn)
    assert first.is_inside()
    second = Visitor(turn)
    assert not second.is_inside(SOON_S)
    first.leave()
    assert second.is_inside()
    second.leave()
    with turn:
        pass


def test_who_comes_again_at_once_does_not_overtake_who_waits() -> None:
    turn, order = StepLock(), list[str]()
    inside = threading.Event()

    def twice() -> None:
        with turn:
            inside.set()
            wait_until(lambda: bool(turn._waiting))
        with turn:
            order.append("came again")

    coming = threading.Thread(target=twice, daemon=True)
    coming.start()
    assert inside.wait(PATIENCE_S)
    with turn:
        order.append("waited")
    coming.join(PATIENCE_S)
    assert order == ["waited", "came again"]


def test_who_was_left_behind_holds_nobody_up_and_ends_nobodys_turn() -> None:
    turn = StepLock()
    stuck = Visitor(turn.step())
    assert stuck.is_inside()
    waiting = Visitor(turn)
    successor = Visitor(turn.take_over())
    assert successor.is_inside()
    stuck.leave()
    assert not waiting.is_inside(SOON_S)
    successor.leave()
    assert waiting.is_inside()
    waiting.leave()


def test_no_other_is_passed_over() -> None:
    turn = StepLock()
    with turn.step():
        pass
    holder = Visitor(turn)
    assert holder.is_inside()
    successor = Visitor(turn.take_over())
    assert not successor.is_inside(SOON_S)
    holder.leave()
    assert successor.is_inside()
    successor.leave()
