"""InFlight: things that a device may still read, taken in turn, each again once it has been read.

Contract: what is given back with a mark is not given out before the device has come to it. Where
all are in flight there is one more, up to `most`; only then the host waits, for the oldest.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch

Thing = TypeVar("Thing")


class Mark(Protocol):
    """A place in what a device has to do, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Has the device come to it?"""

    def synchronize(self) -> None:
        """Waits until it has."""


class Reached:
    """Implements `Mark`: of a device that has done what it was told when the call returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def mark_on(device: torch.device) -> Mark:
    """Behind all that the device was told so far, in its current stream."""
    if device.type != "cuda":
        return Reached()
    make_event: Any = torch.cuda.Event  # typed in some versions only
    event = make_event()
    event.record(torch.cuda.current_stream(device))
    mark: Mark = event
    return mark


class InFlight(Generic[Thing]):
    """Args: `make`: one more of them."""

    def __init__(self, make: Callable[[], Thing], most: int) -> None:
        self._make = make
        self._left = most
        self._returned: deque[tuple[Thing, Mark]] = deque()

    def take(self) -> Thing:
        """Raises `RuntimeError` where all that there may be were taken, and none was given back."""
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
