"""InFlight: objects that a device may still read, reused in turn once it has read them.

Contract: an object that was given back with a mark is not given out before the device has reached
the mark. If all are in flight, one more is made, up to `most`; only then does the host wait, for
the oldest.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch

Thing = TypeVar("Thing")


class Mark(Protocol):
    """A point in a device's queue, such as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether the device has reached it."""

    def synchronize(self) -> None:
        """Wait until the device has reached it."""


class Reached:
    """Implementation of `Mark` for a device that has finished when a call returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def mark_on(device: torch.device) -> Mark:
    """Return a mark after all work queued so far in the device's current stream."""
    if device.type != "cuda":
        return Reached()
    make_event: Any = torch.cuda.Event  # typed in some versions only
    event = make_event()
    event.record(torch.cuda.current_stream(device))
    mark: Mark = event
    return mark


class InFlight(Generic[Thing]):
    """Pool of reusable objects; `make` returns a new one, `most` times."""

    def __init__(self, make: Callable[[], Thing], most: int) -> None:
        self._make = make
        self._left = most
        self._returned: deque[tuple[Thing, Mark]] = deque()

    def take(self) -> Thing:
        """Return an object; raise `RuntimeError` if `most` are taken and none was given back."""
        if self._left and not (self._returned and self._returned[0][1].query()):
            self._left -= 1
            return self._make()
        if not self._returned:
            raise RuntimeError("all are taken")
        thing, mark = self._returned.popleft()
        mark.synchronize()
        return thing

    def give_back(self, thing: Thing, mark: Mark) -> None:
        self._returned.append((thing, mark))
