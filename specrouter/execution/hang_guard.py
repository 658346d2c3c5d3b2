"""A guard that detects a model whose forward does not return.

A thread that is stuck in a forward cannot be stopped. The thread that checks the guard ends the
engine, and a supervisor restarts the process.

The time is the host's: on an accelerator, where a forward returns before it has been computed, a
stuck kernel shows only as a cycle that does not end.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class HangGuard:
    """A guard for the forwards of one thread; any thread may call `overdue`.

    Args:
        limit_s: most time that a forward may take.
        clock: returns seconds.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self._clock = clock
        self._running: tuple[str, float] | None = None  # the model, and since when

    @contextmanager
    def inside(self, model: str) -> Iterator[None]:
        """Enclose a forward of a model."""
        self._running = model, self._clock()
        try:
            yield
        finally:
            self._running = None

    def overdue(self) -> str | None:
        """Return the model whose forward has taken longer than the limit, or None."""
        running = self._running
        if running is not None and self._clock() - running[1] >= self.limit_s:
            return running[0]
        return None
