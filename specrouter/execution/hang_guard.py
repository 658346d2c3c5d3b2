"""HangGuard: gives up on a model whose forward does not return.

Nothing can stop a thread that is stuck in a forward, so the thread is left behind: another one goes
on with the engine, and the old one, should its forward ever return, finds that it was given up and
ends. On its way it scrubs the slots of its forward and sets torch's threads back, its own. That is
safe because it is only ever left behind in a forward, which reads weights and writes one model's
cache, and that cache is forgotten.

The time is the host's: on an accelerator, where a forward returns before it has been computed,
a stuck kernel is not noticed here.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class Abandoned(BaseException):
    """Raised in a thread that was left behind; no `except Exception` may keep it going."""


@dataclass(eq=False)
class _Visit:
    model: str
    started: float
    given_up: bool = False


class HangGuard:
    """Thread-safe. Args: `limit_s` that a forward may take."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self._clock = clock
        self._lock = threading.Lock()
        self._visits: dict[int, _Visit] = {}  # by thread

    @contextmanager
    def inside(self, model: str) -> Iterator[None]:
        """Around a forward. Raises `Abandoned` at its end if it was given up."""
        visit = _Visit(model, self._clock())
        thread = threading.get_ident()
        with self._lock:
            self._visits[thread] = visit
        try:
            yield
        finally:
            with self._lock:
                if visit.given_up:
                    raise Abandoned(model)
                self._visits.pop(thread, None)

    def give_up(self) -> str | None:
        """The model whose forward has taken too long, which from now on is given up; or None."""
        with self._lock:
            for thread, visit in self._visits.items():
                if self._clock() - visit.started >= self.limit_s:
                    visit.given_up = True
                    del self._visits[thread]
                    return visit.model
        return None
