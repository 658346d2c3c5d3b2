"""Drain: the generation requests in flight, and whether the service still takes new ones.

Contract: once `begin` was called no request is let in any more; those that are in flight go on.
Belongs to the event loop's thread. Ending requests that take too long is the server's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_POLL_S = 0.05


class Drain:
    def __init__(self) -> None:
        self._is_draining = False
        self._in_flight = 0

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def in_flight(self) -> int:
        """Requests that were let in and whose last byte is not yet handed to the connection."""
        return self._in_flight

    def begin(self) -> None:
        self._is_draining = True

    @contextmanager
    def flight(self) -> Iterator[None]:
        """One request, from its arrival to the end of its response."""
        assert not self._is_draining, "a request is refused once the service drains"
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    async def wait_until_idle(
        self, timeout_s: float, is_cut_short: Callable[[], bool] = lambda: False
    ) -> bool:
        """Whether nothing is in flight, after at most `timeout_s`, or less if it is cut short."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self._in_flight and loop.time() < deadline and not is_cut_short():
            await asyncio.sleep(_POLL_S)
        return not self._in_flight
