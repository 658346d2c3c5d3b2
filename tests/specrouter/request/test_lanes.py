"""Large work does not hold up small work, and waits for its turn."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

from specrouter.request import lanes as lanes_module
from specrouter.request.errors import OverloadedError, UnavailableError
from specrouter.request.lanes import LONG_CHARACTERS, Lanes, MemoryReturn, lane_of
from tests.specrouter.faults import PATIENCE_S


def using(test: Callable[[Lanes], Awaitable[None]]) -> None:
    async def run() -> None:
        lanes = Lanes()
        try:
            async with asyncio.timeout(20):
                await test(lanes)
        finally:
            lanes.close()

    asyncio.run(run())


def test_a_long_text_waits_for_another_and_a_short_one_does_not() -> None:
    end, begun = threading.Event(), list[int]()

    def long(number: int) -> int:
        begun.append(number)
        assert end.wait(60)
        return number

    async def test(lanes: Lanes) -> None:
        assert lane_of(LONG_CHARACTERS + 1) == "large"
        several = [asyncio.ensure_future(lanes.run("large", long, one)) for one in range(3)]
        while not begun:
            await asyncio.sleep(0.001)
        assert await lanes.run(lane_of(LONG_CHARACTERS), str, 5) == "5"
        assert await lanes.run("structures", str, 6) == "6"
        assert begun == [0]
        end.set()
        assert await asyncio.gather(*several) == [0, 1, 2]

    using(test)


def test_as_many_wait_as_may_and_who_leaves_makes_room() -> None:
    end = threading.Event()

    async def test(lanes: Lanes) -> None:
        first = asyncio.ensure_future(lanes.run("tokenize", end.wait, 20, max_waiting=1))
        await asyncio.sleep(0)
        second = asyncio.ensure_future(lanes.run("tokenize", str, 2, max_waiting=1))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError) as refused:
            await lanes.run("tokenize", str, 3, max_waiting=1)
        assert refused.value.retry_after_s > 0
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        third = asyncio.ensure_future(lanes.run("tokenize", str, 3, max_waiting=1))
        end.set()
        assert await first
        assert await third == "3"

    using(test)


def test_what_has_not_begun_when_lanes_are_closed_is_told_so() -> None:
    end = threading.Event()

    async def test(lanes: Lanes) -> None:
        first = asyncio.ensure_future(lanes.run("large", end.wait, 20))
        await asyncio.sleep(0)
        second = asyncio.ensure_future(lanes.run("large", str, 2))
        await asyncio.sleep(0)
        lanes.close()
        end.set()
        assert await first
        with pytest.raises(UnavailableError):
            await second

    using(test)


def test_closed_lanes_take_nothing() -> None:
    async def test(lanes: Lanes) -> None:
        lanes.close()
        with pytest.raises(UnavailableError):
            await lanes.run("requests", str)

    using(test)


# Memory is given back soon after large work, and not at each piece of it


def test_once_for_much_that_is_done_and_again_for_what_is_done_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, planned, given_s = 100.0, list[tuple[float, Callable[[], None]]](), list[float]()

    class Timer:
        def __init__(self, delay_s: float, give: Callable[[], None]) -> None:
            planned.append((delay_s, give))

        def start(self) -> None:
            pass

    monkeypatch.setattr(lanes_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(threading, "Timer", Timer)
    returned = MemoryReturn(lambda: given_s.append(now_s))
    for pause_s in (lanes_module._DELAY_S, lanes_module._PAUSE_S):
        for _ in range(5):
            returned.soon()
        delay_s, give = planned.pop()
        assert delay_s == pytest.approx(pause_s)
        assert not planned
        now_s += delay_s
        give()
    assert len(given_s) == 2


def test_it_is_given_back_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "_DELAY_S", 0.01)
    given, threads = threading.Event(), list[threading.Thread]()

    def trim() -> None:
        threads.append(threading.current_thread())
        given.set()

    MemoryReturn(trim).soon()
    assert given.wait(PATIENCE_S)
    assert [(one.name, one.daemon) for one in threads] == [("specrouter-memory", True)]


def test_the_system_takes_it_or_has_no_such_function(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes_module._glibc_trim()()
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    assert lanes_module._glibc_trim() is lanes_module._no_trim
