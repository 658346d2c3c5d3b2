"""LoopThread: an event loop in a thread of its own, which replicas are listened to in."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class LoopThread:
    """Close it from outside of its loop."""

    def __init__(self, name: str) -> None:
        self._loop, self._is_over = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, Result]) -> "Future[Result]":
        """From any thread; cancelling what it returns cancels the work."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Waits for it. Raises what it raises."""
        done = self.start(work)
        try:
            return done.result()
        except BaseException:
            done.cancel()
            raise

    def call(self, function: Callable[[], Result]) -> Result:
        """In the loop, between what runs there."""

        async def work() -> Result:
            return function()

        return self.run(work())

    def close(self, timeout_s: float = 5.0) -> None:
        """What still runs there is cancelled; what does not end in time is left behind."""
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._is_over.wait())
