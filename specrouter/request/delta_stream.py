"""DeltaStream: the deltas of several samples, passed from any threads to a coroutine.

Contract: deltas come in the order in which they were posted, each with the number of its prompt.
Closing a stream cancels its samples that still run, and those that only begin afterwards.
"""

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Protocol, Self

from specrouter.request.output import Delta

Delivery = Callable[[], object]  # runs in the loop; must not raise


class Running(Protocol):
    def cancel(self) -> object: ...


class LoopMailbox:
    """A queue from any thread to the coroutines of one event loop, in order.

    Waking a loop costs a system call, during which the engine may lose the interpreter to that
    loop: the deltas of a cycle wake it about once, and not once for each.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)  # weak: it must not keep the key of its entry alive
        self._waiting: deque[Delivery] = deque()
        self._is_woken = False

    def post(self, delivery: Delivery) -> None:
        """Queue a delivery. Raises `RuntimeError` if the loop is closed."""
        self._waiting.append(delivery)
        if self._is_woken:
            return
        self._is_woken = True
        try:
            loop = self._loop()
            if loop is None:
                raise RuntimeError("the event loop is gone")
            loop.call_soon_threadsafe(self._deliver)
        except BaseException:
            self._is_woken = False
            raise

    def _deliver(self) -> None:
        self._is_woken = False  # before the queue is read: later posts must wake the loop again
        while self._waiting:
            self._waiting.popleft()()


class DeltaStream:
    """An asynchronous iterator over pairs `(number, delta)`, which must be closed.

    `begin` and `put` may be called from any thread, the rest from the loop of the mailbox.
    """

    def __init__(self, mailbox: LoopMailbox) -> None:
        self._mailbox = mailbox
        self._deltas: asyncio.Queue[tuple[int, Delta]] = asyncio.Queue()
        self._running: Sequence[Running] = ()
        self._left = 0
        self._is_closed = False

    def begin(self, running: Sequence[Running]) -> None:
        """Set the samples, each of which will post one last delta."""
        self._running, self._left = running, len(running)
        if self._is_closed:
            self._cancel()

    def put(self, number: int, delta: Delta) -> None:
        self._mailbox.post(partial(self._deltas.put_nowait, (number, delta)))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Delta]:
        if not self._left:
            raise StopAsyncIteration
        number, delta = await self._deltas.get()
        self._left -= delta.finish_reason is not None
        return number, delta

    async def together(self) -> AsyncGenerator[tuple[Delta, ...]]:
        """Yield all deltas that have come, each time."""
        async for _, first in self:
            found = [first]
            while not self._deltas.empty():
                found.append((await anext(self))[1])
            yield tuple(found)

    async def aclose(self) -> None:
        self._is_closed = True
        self._cancel()

    def _cancel(self) -> None:
        for one in self._running:
            one.cancel()


class DeltaStreams:
    """A factory of streams, in which the streams of a loop share its mailbox."""

    def __init__(self) -> None:
        self._mailboxes = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopMailbox]()

    def open(self) -> DeltaStream:
        """Return a stream for the running loop."""
        loop = asyncio.get_running_loop()
        mailbox = self._mailboxes.get(loop)
        if mailbox is None:
            mailbox = self._mailboxes[loop] = LoopMailbox(loop)
        return DeltaStream(mailbox)
