"""StepLock: a lock that passes over a thread which was left behind."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class StepLock:
    """`with lock:` for one thread at a time, in the order in which they come; not reentrant.

    Nobody waits for a thread that was passed over; its leaving, should it come, changes nothing.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: int | None = None  # a thread's identifier
        self._waiting: deque[int] = deque()
        self._stepper: int | None = None  # the thread of the last step
        self._began_s: float | None = None

    def __enter__(self) -> None:
        self._enter(None)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            if self._holder == threading.get_ident():
                self._holder = None
                self._changed.notify_all()

    @property
    def step_s(self) -> float:
        """Seconds since the `step` that runs began; 0.0 between steps."""
        began_s = self._began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    @contextmanager
    def step(self) -> Iterator[None]:
        """`with lock:` around what must end within a time."""
        with self:
            self._stepper = threading.get_ident()
            began_s = self._began_s = time.monotonic()
            try:
                yield
            finally:
                if self._began_s == began_s:  # else another thread has taken over
                    self._began_s = None

    @contextmanager
    def take_over(self) -> Iterator[None]:
        """`with lock:` that does not wait for the thread of the last step, and comes first."""
        self._enter(self._stepper)
        try:
            self._began_s = None
            yield
        finally:
            self.__exit__()

    def _enter(self, left_behind: int | None) -> None:
        me = threading.get_ident()
        with self._changed:
            if left_behind is None:
                self._waiting.append(me)
            else:
                self._waiting.appendleft(me)
            try:
                # One that leaves and comes again at once must not overtake those who wait.
                while self._holder not in (None, left_behind) or self._waiting[0] != me:
                    self._changed.wait()
                self._holder = me
            finally:
                self._waiting.remove(me)
                self._changed.notify_all()
