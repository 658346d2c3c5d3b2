"""DeltaStream: what several samples say, on its way from any threads to a coroutine.

Contract: deltas come in the order in which they were told, each with the number of its prompt.
Closing a stream cancels what of it still runs, and also what is only begun afterwards.
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
    """Hands what any thread tells over to coroutines of one event loop, in that order.

    Waking a loop costs a system call, in which the engine may lose the interpreter to the loop that
    it wakes: the deltas of a cycle wake it about once, and not once for each.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)  # mailboxes are kept by loop, for as long as there is one
        self._waiting: deque[Delivery] = deque()
        self._is_woken = False

    def post(self, delivery: Delivery) -> None:
        """Raises `RuntimeError` where the loop is closed."""
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
        self._is_woken = False  # before the last look: what is posted behind it wakes anew
        while self._waiting:
            self._waiting.popleft()()


class DeltaStream:
    """Iterate over pairs `(number, delta)`, and close it. `begin` and `tell` may be called from any
    thread, the rest from the loop of the mailbox."""

    def __init__(self, mailbox: LoopMailbox) -> None:
        self._mailbox = mailbox
        self._deltas: asyncio.Queue[tuple[int, Delta]] = asyncio.Queue()
        self._running: Sequence[Running] = ()
        self._left = 0
        self._is_closed = False

    def begin(self, running: Sequence[Running]) -> None:
        """These tell it one last delta each."""
        self._running, self._left = running, len(running)
        if self._is_closed:
            self._cancel()

    def tell(self, number: int, delta: Delta) -> None:
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
        """All that have come each time."""
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
    """Streams of a loop share its mailbox."""

    def __init__(self) -> None:
        self._mailboxes = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopMailbox]()

    def open(self) -> DeltaStream:
        """For the loop that runs here."""
        loop = asyncio.get_running_loop()
        mailbox = self._mailboxes.get(loop)
        if mailbox is None:
            mailbox = self._mailboxes[loop] = LoopMailbox(loop)
        return DeltaStream(mailbox)
