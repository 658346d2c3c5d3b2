"""CallQueue: what others have run in the engine's thread, between its steps.

Contract: every call that is taken is answered once: with what it returns or raises, that it hangs,
or that it will never be run. May be asked from any thread; it is run by one.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from specrouter.execution.hang_guard import Abandoned


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
        try:
            value = function()
        except Abandoned:  # whoever took over has told the caller
            raise
        except BaseException as error:  # the caller's affair, `SystemExit` too
            self._running = None
            result.set_exception(error)
        else:
            self._running = None
            result.set_result(value)

    def give_up(self, error: Exception) -> None:
        """The call that runs hangs, if one does. It is not run again."""
        running, self._running = self._running, None
        if running is not None:
            running.set_exception(error)

    def close(self, error: Exception) -> None:
        """Nothing is run any more."""
        self.give_up(error)
        while self._waiting:
            self._waiting.popleft()[1].set_exception(error)
