"""RequestLog: an id for every HTTP request, and one line in the log when it ends.

Probes and scrapes come every few seconds, so their lines have the level DEBUG.

Contract: the id is the client's own `x-request-id` (1 to 128 printable ASCII characters without
spaces), else a fresh one. It is in the scope's state and in the answer, also in refusals and
failures: this is the outermost layer of the service. Queries and bodies are never logged.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specrouter.logs import REQUEST_ID

logger = logging.getLogger(__name__)

HEADER = "x-request-id"

_PROBED = frozenset({"/health", "/metrics"})

_USABLE = re.compile(r"[!-~]{1,128}")
_CLIENT_CLOSED_REQUEST = 499  # nginx's number
_FAILED = 500  # the server's answer if the application sent none


class RequestLog:
    """Pure ASGI middleware, through which a stream passes message by message."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get(HEADER))
        scope.setdefault("state", {})["request_id"] = request_id
        # Not reset, since the server logs errors after this; each request has its own task.
        REQUEST_ID.set(request_id)
        seen = {"status": _CLIENT_CLOSED_REQUEST, "bytes": 0, "client_left": False}
        is_complete, started_s = False, time.perf_counter()

        async def received() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and not is_complete:
                seen["client_left"] = True
            return message

        async def answer(message: Message) -> None:
            nonlocal is_complete
            if message["type"] == "http.response.start":
                seen["status"] = message["status"]
                MutableHeaders(scope=message)[HEADER] = request_id
            elif message["type"] == "http.response.body":
                seen["bytes"] += len(message.get("body", b""))
                is_complete = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, received, answer)
        except BaseException:
            if seen["status"] == _CLIENT_CLOSED_REQUEST:
                seen["status"] = _FAILED
            raise
        finally:
            duration_ms = round((time.perf_counter() - started_s) * 1000, 1)
            _log(scope, {"request_id": request_id, "duration_ms": duration_ms, **seen})


def _log(scope: Scope, seen: dict[str, Any]) -> None:
    client = scope.get("client")
    seen["client"] = f"{client[0]}:{client[1]}" if client else None
    seen["method"], seen["path"] = scope["method"], quote(scope["path"])  # it may hold line feeds
    logger.log(
        logging.DEBUG if seen["path"] in _PROBED else logging.INFO,
        '%s "%s %s" %d, %.1f ms, %d bytes%s',
        *(seen[name] for name in ("client", "method", "path", "status", "duration_ms", "bytes")),
        ", the client left" if seen["client_left"] else "",
        extra=seen,
    )


def _request_id(sent: str | None) -> str:
    return sent if sent is not None and _USABLE.fullmatch(sent) else uuid.uuid4().hex
