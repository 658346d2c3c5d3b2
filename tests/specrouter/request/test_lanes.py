"""Large work does not hold up small work, and waits for its turn."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from specrouter.request.errors import OverloadedError, UnavailableError
from specrouter.request.lanes import LONG_CHARACTERS, Lanes, lane_of


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


def test_what_a_job_raises_is_told() -> None:
    async def test(lanes: Lanes) -> None:
        with pytest.raises(ZeroDivisionError):
            await lanes.run("large", divmod, 1, 0)

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
