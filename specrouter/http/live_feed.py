"""`GET /router/live`: what the page shows, as server-sent events, one a second.

Contract: read-only. All viewers share one snapshot a second, which is made beside the event loop
and encoded once; nobody watches, nothing is made. A viewer that is slow misses snapshots. Beyond
`MAX_VIEWERS` the answer is 503. Streams end when the service drains.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator

from fastapi import FastAPI
from fastapi.responses import Response

from specrouter.engine.serving import ServingRouter
from specrouter.http.drain import Drain
from specrouter.http.error_answer import error_payload, overloaded
from specrouter.http.live_snapshot import live_snapshot
from specrouter.http.streams import ClosedStream, framed

logger = logging.getLogger(__name__)

FEED_PATH = "/router/live"
MAX_VIEWERS = 16
_RETRY_S = 10
INTERVAL_S = 1.0


def add_live_feed(app: FastAPI, router: ServingRouter, drain: Drain | None) -> None:
    feed = LiveFeed(router, drain or Drain())

    @app.get(FEED_PATH, include_in_schema=False)
    async def live() -> Response:
        if feed.viewers >= MAX_VIEWERS:
            return overloaded(f"{MAX_VIEWERS} pages watch already", retry_after_s=_RETRY_S)
        return ClosedStream(feed.events(), feed.enter())


class LiveFeed:
    """Belongs to one event loop."""

    def __init__(self, router: ServingRouter, drain: Drain, interval_s: float = INTERVAL_S) -> None:
        self._router = router
        self._drain = drain
        self._interval_s = interval_s
        self.viewers = 0
        self._next: asyncio.Future[bytes] | None = None  # the event that is being made
        self._making: asyncio.Task[None] | None = None

    def enter(self) -> _Viewer:
        """It counts until it is closed."""
        return _Viewer(self)

    async def events(self) -> AsyncGenerator[bytes]:
        """Of one viewer."""
        while not self._drain.is_draining:
            yield await self._event()

    async def _event(self) -> bytes:
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        if self._making is None or self._making.done():
            self._making = asyncio.create_task(self._make())
        return await asyncio.shield(self._next)

    async def _make(self) -> None:
        """Event after event, as long as somebody waits for the next."""
        while self._next is not None:
            event = await asyncio.to_thread(self._encoded)
            told, self._next = self._next, None
            told.set_result(event)
            await asyncio.sleep(self._interval_s)

    def _encoded(self) -> bytes:
        try:
            content = live_snapshot(self._router)
        except Exception as error:  # viewers are told, and the next may be well
            logger.exception("the page's snapshot failed")
            content = error_payload(500, f"{type(error).__name__}: {error}", code="snapshot_failed")
        return framed(json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode())


class _Viewer:
    def __init__(self, feed: LiveFeed) -> None:
        self._feed = feed
        feed.viewers += 1

    async def aclose(self) -> None:
        self._feed.viewers -= 1
