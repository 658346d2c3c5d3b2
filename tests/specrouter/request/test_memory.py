"""Memory is given back soon after large work, and not at each piece of it."""

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from specrouter.request import memory
from specrouter.request.memory import MemoryReturn
from tests.specrouter.faults import PATIENCE_S


def test_once_for_much_that_is_done_and_again_for_what_is_done_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, planned, given_s = 100.0, list[tuple[float, Callable[[], None]]](), list[float]()

    class Timer:
        def __init__(self, delay_s: float, give: Callable[[], None]) -> None:
            planned.append((delay_s, give))

        def start(self) -> None:
            pass

    monkeypatch.setattr(memory, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(threading, "Timer", Timer)
    returned = MemoryReturn(lambda: given_s.append(now_s))
    for pause_s in (memory._DELAY_S, memory._PAUSE_S):
        for _ in range(5):
            returned.soon()
        delay_s, give = planned.pop()
        assert delay_s == pytest.approx(pause_s)
        assert not planned
        now_s += delay_s
        give()
    assert len(given_s) == 2


def test_it_is_given_back_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_DELAY_S", 0.01)
    given, threads = threading.Event(), list[threading.Thread]()

    def trim() -> None:
        threads.append(threading.current_thread())
        given.set()

    MemoryReturn(trim).soon()
    assert given.wait(PATIENCE_S)
    assert [(one.name, one.daemon) for one in threads] == [("specrouter-memory", True)]


def test_the_system_takes_it_or_has_no_such_function(monkeypatch: pytest.MonkeyPatch) -> None:
    memory._glibc_trim()()
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    assert memory._glibc_trim() is memory._no_trim
