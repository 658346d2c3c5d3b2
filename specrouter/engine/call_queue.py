"""CallQueue: what others have run in the engine's thread, between its steps.

Contract: every call that is taken is answered once: with what it returns or raises, or that the
engine has ended. May be asked from any thread; it is run by one.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any


class CallQueue:
    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._running: Future[Any] | None = None

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, function: Callable[[], Any]) -> "Future[Any]":
        result: Future[Any] = Future()
        self._waiting.append((function, result))
        return result

    def run_next(self) -> None:
        function, result = self._waiting.popleft()
        self._running = result
        with suppress(InvalidStateError):  # it has hung, and `close` has told the caller
            try:
                value = function()
            except BaseException as error:  # the caller's affair, `SystemExit` too
                result.set_exception(error)
            else:
                result.set_result(value)

    def close(self, error: Exception) -> None:
        """Nothing is run any more, and the call that runs has no result."""
        left = [result for _, result in self._waiting]
        self._waiting.clear()
        for result in (self._running, *left):
            with suppress(InvalidStateError):
                if result is not None:
                    result.set_exception(error)
