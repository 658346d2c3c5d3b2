"""Drain: the generation requests in flight, and whether the service still takes new ones.

Contract: after `begin` no request is accepted any more; those in flight go on. A request that is
still being sent is not in flight: its client may never go on. Everything runs in the event loop's
thread. The server ends requests that take too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

_POLL_S = 0.05
_LAST_ARRIVAL_S = 0.5  # time for requests that are being sent when the drain begins


class Drain:
    """State of a service that drains or not.

    `in_flight`: accepted requests whose last byte has not been handed to the connection yet.
    """

    def __init__(self) -> None:
        self.is_draining = False
        self.in_flight = 0
        self._arrivals = set[asyncio.Timeout]()

    def begin(self) -> None:
        self.is_draining = True
        for limit in self._arrivals:
            if not limit.expired():
                last_s = asyncio.get_running_loop().time() + _LAST_ARRIVAL_S
                limit.reschedule(min(last_s, limit.when() or last_s))

    @asynccontextmanager
    async def arrival(self, timeout_s: float) -> AsyncIterator[None]:
        """Limit the time in which one request is read, within the context.

        Raises `TimeoutError` after `timeout_s`, or shortly after the drain has begun.
        """
        patience_s = min(timeout_s, _LAST_ARRIVAL_S) if self.is_draining else timeout_s
        async with asyncio.timeout(patience_s) as limit:
            self._arrivals.add(limit)
            try:
                yield
            finally:
                self._arrivals.discard(limit)

    @contextmanager
    def flight(self) -> Iterator[None]:
        """Count a request as in flight, from when it has been read to the end of its response."""
        assert not self.is_draining, "a request is refused once the service drains"
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def wait_until_idle(
        self, timeout_s: float, is_cut_short: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait until nothing is in flight, and return whether that is so.

        The wait ends after `timeout_s`, or as soon as `is_cut_short()` is true.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self.in_flight and loop.time() < deadline and not is_cut_short():
            await asyncio.sleep(_POLL_S)
        return not self.in_flight
