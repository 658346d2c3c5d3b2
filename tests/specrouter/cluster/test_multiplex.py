"""Replies of many attempts in few messages: in order, each to its own stream, none left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from specrouter.cluster.link import Attempt, ReplicaLostError, Reply
from specrouter.cluster.multiplex import Order, Pieces, ReplyReceiver, ReplySender
from specrouter.cluster.state import RoutedRequest
from specrouter.engine.request import Request
from specrouter.request.params import SamplingParams

ARGS = Request(prompt=(1,), params=SamplingParams(), speculation=None, slo=None)
STREAMS, REPLIES = 5, 4


def attempt(number: int) -> Attempt:
    routed = RoutedRequest(number=number, prompt_tokens=1, remaining=1)
    return Attempt(args=ARGS, routed=routed, number=number, request_id=None)


class Wire:
    """A replica whose attempts reply whenever `cycle` is set: that all come to is in `sent`."""

    def __init__(self) -> None:
        self.sent: list[Pieces] = []
        self.orders: list[list[Order]] = []
        self.cancelled: list[int] = []
        self.is_cut = asyncio.Event()
        self.may_reply = asyncio.Semaphore(0)
        self.sender = ReplySender(self.serve)
        self.receiver = ReplyReceiver(self.listen, self.post)

    async def serve(self, one: Attempt) -> AsyncGenerator[Reply]:
        try:
            for number in range(REPLIES):
                await self.may_reply.acquire()
                if one.request_id == "fails":
                    raise ValueError("as it was told to")
                yield Reply(declined=f"{one.number}.{number}")
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled.append(one.number)
            raise

    async def listen(self) -> AsyncGenerator[Pieces]:
        async with aclosing(self.sender.messages()) as messages:
            async for pieces in messages:
                if self.is_cut.is_set():
                    raise ConnectionError("the wire is cut")
                self.sent.append(pieces)
                yield pieces

    async def post(self, orders: Sequence[Order]) -> None:
        self.orders.append(list(orders))
        self.sender.take(orders)

    async def replies(self, one: Attempt) -> list[str | None]:
        async with aclosing(self.receiver.stream(one)) as replies:
            return [reply.declined async for reply in replies]

    async def settled(self) -> None:
        """Nothing happens any more by itself."""
        for _ in range(50):
            await asyncio.sleep(0)


def on_a_wire(test: Callable[[Wire], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        async def within() -> None:
            async with asyncio.timeout(20):
                await test(Wire())

        asyncio.run(within())

    return run


async def _all(wire: Wire) -> list[asyncio.Task[list[str | None]]]:
    tasks = [asyncio.create_task(wire.replies(attempt(number))) for number in range(STREAMS)]
    await wire.settled()
    return tasks


@on_a_wire
async def test_each_stream_gets_its_own_replies_in_order(wire: Wire) -> None:
    tasks = await _all(wire)
    for _ in range(STREAMS * REPLIES):
        wire.may_reply.release()
    found = await asyncio.gather(*tasks)
    assert found == [[f"{one}.{at}" for at in range(REPLIES)] for one in range(STREAMS)]
    await wire.settled()
    assert not wire.sender._running
    assert not wire.cancelled


@on_a_wire
async def test_what_comes_together_travels_together(wire: Wire) -> None:
    tasks = await _all(wire)
    assert [len(orders) for orders in wire.orders] == [STREAMS]
    for _ in range(STREAMS):
        wire.may_reply.release()
    await wire.settled()
    assert [len(pieces) for pieces in wire.sent] == [0, STREAMS]
    for task in tasks:
        task.cancel()


@on_a_wire
async def test_a_stream_that_is_closed_cancels_its_attempt_and_no_other(wire: Wire) -> None:
    tasks = await _all(wire)
    tasks[2].cancel()
    await wire.settled()
    assert wire.cancelled == [2]
    assert sorted(wire.sender._running) == [0, 1, 3, 4]


@on_a_wire
async def test_a_stream_that_is_closed_at_once_is_never_begun(wire: Wire) -> None:
    task = asyncio.create_task(wire.replies(attempt(0)))
    await asyncio.sleep(0)
    task.cancel()
    await wire.settled()
    assert not wire.sender._running
    assert [order for orders in wire.orders for order in orders if order.attempt] == []


@on_a_wire
async def test_an_attempt_that_fails_raises_in_its_own_stream(wire: Wire) -> None:
    tasks = await _all(wire)
    failing = asyncio.create_task(wire.replies(replace(attempt(9), request_id="fails")))
    await wire.settled()
    for _ in range(STREAMS * REPLIES + 1):
        wire.may_reply.release()
    with pytest.raises(RuntimeError, match="ValueError: as it was told to"):
        await failing
    assert [len(found) for found in await asyncio.gather(*tasks)] == [REPLIES] * STREAMS


@on_a_wire
async def test_where_the_messages_end_all_streams_raise_and_none_can_be_begun(wire: Wire) -> None:
    tasks = await _all(wire)
    wire.is_cut.set()
    wire.may_reply.release()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, ReplicaLostError) for one in found)
    assert wire.receiver.is_closed
    with pytest.raises(ReplicaLostError):
        await wire.replies(attempt(7))
    await wire.settled()
    assert not wire.sender._running, "nobody hears them any more"


@on_a_wire
async def test_what_cannot_be_brought_raises_in_its_own_stream(wire: Wire) -> None:
    tasks = await _all(wire)

    async def post(orders: Sequence[Order]) -> None:
        raise KeyError("who is that")

    wire.receiver._post = post
    with pytest.raises(ReplicaLostError, match="who is that"):
        await wire.replies(attempt(9))
    assert not any(task.done() for task in tasks)


@on_a_wire
async def test_closing_the_receiver_ends_its_streams_and_the_attempts(wire: Wire) -> None:
    tasks = await _all(wire)
    await wire.receiver.close()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, ReplicaLostError) for one in found)
    assert sorted(wire.cancelled) == list(range(STREAMS))
