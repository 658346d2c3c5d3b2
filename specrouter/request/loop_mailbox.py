"""LoopMailbox: hands what the engine's thread tells over to coroutines of one event loop.

Contract: in the order in which it is told. Waking a loop costs a system call, in which the engine
may lose the interpreter to the loop that it wakes: the deltas of a cycle wake it about once, and
not once for each.
"""

import asyncio
import weakref
from collections import deque
from collections.abc import Callable

Delivery = Callable[[], object]  # runs in the loop; must not raise


class LoopMailbox:
    """May be posted to from any thread."""

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
