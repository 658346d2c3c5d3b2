"""StepLock: a lock that passes over a thread which was left behind."""

import threading
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

    def __enter__(self) -> None:
        self._enter(None)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            if self._holder == threading.get_ident():
                self._holder = None
                self._changed.notify_all()

    @contextmanager
    def after(self, left_behind: int | None) -> Iterator[None]:
        """`with lock:` that does not wait for this thread, and comes first."""
        self._enter(left_behind)
        try:
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
