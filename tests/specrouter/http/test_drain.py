"""The count of what is in flight, and the wait for its end."""

from __future__ import annotations

import asyncio

import pytest

from specrouter.http.drain import Drain


def test_request_that_fails_is_no_longer_in_flight() -> None:
    drain = Drain()

    def fail() -> None:
        with drain.flight():
            assert drain.in_flight == 1
            raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        fail()
    assert drain.in_flight == 0


def test_wait_ends_with_the_last_request() -> None:
    async def scenario() -> bool:
        drain = Drain()

        async def request() -> None:
            with drain.flight():
                await asyncio.sleep(0.05)

        requests = [asyncio.create_task(request()) for _ in range(3)]
        await asyncio.sleep(0)
        drain.begin()
        ended = await drain.wait_until_idle(10.0)
        assert all(request.done() for request in requests)
        return ended

    assert asyncio.run(asyncio.wait_for(scenario(), 5.0))


def test_wait_ends_at_its_limit_or_when_it_is_cut_short() -> None:
    async def scenario() -> None:
        drain = Drain()
        with drain.flight():
            assert not await drain.wait_until_idle(0.01)
            assert not await drain.wait_until_idle(1000.0, lambda: True)

    asyncio.run(asyncio.wait_for(scenario(), 5.0))
