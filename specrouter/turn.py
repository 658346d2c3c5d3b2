"""Turn: a lock that passes over a thread which was left behind."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turn:
    """`with turn:` for one thread at a time; not reentrant.

    Nobody waits for a thread that was passed over; its leaving, should it come, changes nothing.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: int | None = None  # a thread's identifier

    def __enter__(self) -> None:
        self._enter(None)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            if self._holder == threading.get_ident():
                self._holder = None
                self._changed.notify()

    @contextmanager
    def after(self, left_behind: int | None) -> Iterator[None]:
        """`with turn:` that does not wait for this thread."""
        self._enter(left_behind)
        try:
            yield
        finally:
            self.__exit__()

    def _enter(self, left_behind: int | None) -> None:
        with self._changed:
            while self._holder not in (None, left_behind):
                self._changed.wait()
            self._holder = threading.get_ident()
