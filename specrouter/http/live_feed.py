"""`GET /router/live`: the data of the page as server-sent events, one per second.

Contract: read-only. All viewers share one snapshot per second, which is made in a thread and
encoded once; without viewers none is made. A slow viewer misses snapshots, and one that reads
nothing for `STALLED_S` is disconnected. Beyond `MAX_VIEWERS` the answer is 503.
Streams end when the service drains.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

from specrouter.engine.serving import ServingRouter
from specrouter.http.answers import error_payload, overloaded
from specrouter.http.drain import Drain
from specrouter.http.live_snapshot import live_snapshot
from specrouter.http.streams import ClosedStream, encoded, framed

logger = logging.getLogger(__name__)

FEED_PATH = "/router/live"
MAX_VIEWERS = 16
_RETRY_S = 10
INTERVAL_S = 1.0
STALLED_S = 30.0


def add_live_feed(app: FastAPI, router: ServingRouter, drain: Drain) -> None:
    feed = LiveFeed(router, drain)

    @app.get(FEED_PATH, include_in_schema=False)
    async def live() -> Response:
        if feed.viewers >= MAX_VIEWERS:
            return overloaded(f"{MAX_VIEWERS} pages watch already", retry_after_s=_RETRY_S)
        return _Watched(feed)


class LiveFeed:
    """Feed of one event loop; `viewers`: streams that run or are about to."""

    def __init__(self, router: ServingRouter, drain: Drain, interval_s: float = INTERVAL_S) -> None:
        self._router = router
        self._drain = drain
        self._interval_s = interval_s
        self.viewers = 0
        self._event: asyncio.Task[bytes] | None = None  # the newest one, which may not be done yet
        self._began_s = 0.0

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the events of one viewer."""
        while not self._drain.is_draining:
            yield await asyncio.shield(self._newest())
            await asyncio.sleep(self._interval_s)

    def _newest(self) -> asyncio.Task[bytes]:
        now_s = asyncio.get_running_loop().time()
        event = self._event
        if event is None or (event.done() and now_s - self._began_s >= self._interval_s):
            event = self._event = asyncio.create_task(asyncio.to_thread(self._encoded))
            self._began_s = now_s
        return event

    def _encoded(self) -> bytes:
        try:
            return framed(encoded(_short(live_snapshot(self._router))))
        except Exception:  # viewers get an error, and the next snapshot may succeed
            logger.exception("the page's snapshot failed")
            reason = "the snapshot failed; the service's log says why"
            return framed(encoded(error_payload(500, reason, code="snapshot_failed")))


def _short(value: Any) -> Any:
    """Return `value` with numbers of three decimals, and None for infinity and NaN."""
    if isinstance(value, Mapping):
        return {key: _short(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_short(one) for one in value]
    if not isinstance(value, float):
        return value
    return round(value, 3) if math.isfinite(value) else None


class _Watched(ClosedStream):
    """Stream of one viewer; it ends if the viewer reads nothing for `STALLED_S`."""

    def __init__(self, feed: LiveFeed) -> None:
        super().__init__(feed.events())
        self._feed = feed
        feed.viewers += 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            async with asyncio.timeout(STALLED_S):
                await send(message)

        try:
            await super().__call__(scope, receive, sent)
        except TimeoutError:
            logger.info("a viewer of the page that reads nothing was closed")
        finally:
            self._feed.viewers -= 1
