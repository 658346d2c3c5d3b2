"""Memory is given back soon after large work, and not at each piece of it."""

import threading
import time

import pytest

from specrouter.request import memory
from specrouter.request.memory import MemoryReturn


def test_once_for_much_that_is_done_and_again_for_what_is_done_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "_DELAY_S", 0.01)
    monkeypatch.setattr(memory, "_PAUSE_S", 0.02)
    given, times_s = threading.Semaphore(0), list[float]()

    def trim() -> None:
        times_s.append(time.monotonic())
        given.release()

    returned = MemoryReturn(trim)
    for _ in range(2):
        for _ in range(5):
            returned.soon()
        assert given.acquire(timeout=10)
    assert len(times_s) == 2
    assert times_s[1] - times_s[0] >= 0.019


def test_the_system_takes_it_or_has_no_such_function(monkeypatch: pytest.MonkeyPatch) -> None:
    memory._glibc_trim()()
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    assert memory._glibc_trim() is memory._no_trim
