"""Multiplexing: the replies of all attempts at a replica, in few messages.

Contract: a message between processes costs more than its contents, and each cycle of an engine has
news of every running request. So all pending items for a receiver travel in one message: attempts
in one direction, replies in the other. Replies of one attempt stay in order. If the messages end,
all streams end with an exception. Closing a stream cancels its attempt without waiting for it.

How messages travel is not part of this module.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from specrouter.cluster.link import Attempt, ReplicaLostError, Reply

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Order:
    """An `attempt` to begin under a key; None cancels the attempt of this key."""

    key: int
    attempt: Attempt | None


@dataclass(frozen=True)
class Piece:
    """A part of one attempt's replies.

    `reply` is None in the last piece; `error` says why the attempt failed, if it did.
    """

    key: int
    reply: Reply | None
    error: str | None = None


Pieces = tuple[Piece, ...]
Serve = Callable[[Attempt], AsyncGenerator[Reply]]
Listen = Callable[[], AsyncGenerator[Pieces]]
Post = Callable[[Sequence[Order]], Awaitable[None]]


class ReplySender:
    """The replica's end, for one caller; `serve` serves an attempt."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._running: dict[int, asyncio.Task[None]] = {}
        self._waiting: list[Piece] = []
        self._came = asyncio.Event()

    def take(self, orders: Sequence[Order]) -> None:
        for order in orders:
            if order.attempt is not None:
                self._running[order.key] = asyncio.create_task(self._run(order.key, order.attempt))
            elif order.key in self._running:
                self._running.pop(order.key).cancel()

    async def messages(self) -> AsyncGenerator[Pieces]:
        """Yield messages; closing the generator cancels all attempts.

        The first one is empty, and says that attempts may come.
        """
        try:
            yield ()
            while True:
                await self._came.wait()
                self._came.clear()
                pieces, self._waiting = tuple(self._waiting), []
                yield pieces
        finally:
            running = list(self._running.values())
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _run(self, key: int, attempt: Attempt) -> None:
        error = None
        try:
            async with aclosing(self._serve(attempt)) as replies:
                async for reply in replies:
                    self._put(Piece(key, reply))
        except Exception as failure:
            logger.exception("attempt %d of request %s", attempt.number, attempt.request_id)
            error = f"{type(failure).__name__}: {failure}"
        finally:
            self._running.pop(key, None)
        self._put(Piece(key, None, error))

    def _put(self, piece: Piece) -> None:
        self._waiting.append(piece)
        self._came.set()


class ReplyReceiver:
    """The caller's end, in one event loop; unusable once `is_closed`.

    Args:
        listen: yields the sender's messages.
        post: sends orders to it. Both raise if the replica is lost.
    """

    def __init__(self, listen: Listen, post: Post) -> None:
        self._listen, self._post = listen, post
        self._keys = itertools.count()
        self._inboxes: dict[int, asyncio.Queue[Piece | Exception]] = {}
        self._orders: list[Order] = []
        self._came = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.is_closed = False

    async def stream(self, attempt: Attempt) -> AsyncGenerator[Reply]:
        if self.is_closed:
            raise ReplicaLostError("its replies have ended")
        if self._task is None:
            self._task = asyncio.create_task(self._carry())
        key, inbox = next(self._keys), asyncio.Queue[Piece | Exception]()
        self._inboxes[key] = inbox
        self._send(Order(key, attempt))
        try:
            while True:
                piece = await inbox.get()
                if isinstance(piece, Exception):
                    raise ReplicaLostError(f"{type(piece).__name__}: {piece}") from piece
                if piece.error is not None:
                    raise RuntimeError(piece.error)
                if piece.reply is None:
                    return
                yield piece.reply
        finally:
            del self._inboxes[key]
            self._cancel(key)

    async def close(self) -> None:
        self.is_closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _send(self, order: Order) -> None:
        self._orders.append(order)
        self._came.set()

    def _cancel(self, key: int) -> None:
        unsent = [order for order in self._orders if order.key == key]
        for order in unsent:
            self._orders.remove(order)
        if not unsent:
            self._send(Order(key, None))

    async def _carry(self) -> None:
        """Distribute messages until the replica is lost."""
        error: Exception = ReplicaLostError("its replies have ended")
        posting = None
        try:
            async with aclosing(self._listen()) as messages:
                async for pieces in messages:
                    posting = posting or asyncio.create_task(self._post_all())
                    self._hand_out(pieces)
        except Exception as failure:
            error = failure
        finally:
            self.is_closed = True
            if posting is not None:
                posting.cancel()
            for inbox in self._inboxes.values():
                inbox.put_nowait(error)

    async def _post_all(self) -> None:
        """Send orders in order; those that come during a call travel together in the next one."""
        while True:
            await self._came.wait()
            self._came.clear()
            orders, self._orders = self._orders, []
            try:
                await self._post(orders)
            except Exception as error:
                self._fail(orders, error)

    def _fail(self, orders: Sequence[Order], error: Exception) -> None:
        for order in orders:
            inbox = self._inboxes.get(order.key)
            if inbox is not None:
                inbox.put_nowait(error)

    def _hand_out(self, pieces: Pieces) -> None:
        for piece in pieces:
            inbox = self._inboxes.get(piece.key)
            if inbox is not None:  # its stream may be closed
                inbox.put_nowait(piece)
