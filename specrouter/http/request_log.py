"""RequestLog: an id for every HTTP request, and one line in the log when it ends.

Probes and scrapes come every few seconds for ever: their lines are of level DEBUG.

Contract: the id is the client's own `x-request-id` (1 to 128 printable ASCII characters without
spaces), else a fresh one. It is in the scope's state and in the answer, also of refusals and
failures: this is the outermost layer of the service. Queries and bodies are never logged.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specrouter.logs import REQUEST_ID

logger = logging.getLogger(__name__)

HEADER = "x-request-id"

_PROBED = frozenset({"/health", "/metrics"})

_USABLE = re.compile(r"[!-~]{1,128}")
_CLIENT_CLOSED_REQUEST = 499  # nginx's number
_FAILED = 500  # what the server answers where the application has not


class RequestLog:
    """Pure ASGI: a stream passes through, message by message."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get(HEADER))
        scope.setdefault("state", {})["request_id"] = request_id
        # Not reset: the server, too, logs what goes wrong, after this. A request has its own task.
        REQUEST_ID.set(request_id)
        exchange = _Exchange(scope, receive, send, request_id)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except BaseException:
            exchange.status = exchange.status or _FAILED
            raise
        finally:
            exchange.log()


class _Exchange:
    """What is seen of one request and its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        self.status: int | None = None
        self._scope, self._receive, self._send = scope, receive, send
        self._request_id = request_id
        self._started_s = time.perf_counter()
        self._bytes = 0
        self._is_complete = False
        self._client_left = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._is_complete:
            self._client_left = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)[HEADER] = self._request_id
        elif message["type"] == "http.response.body":
            self._bytes += len(message.get("body", b""))
            self._is_complete = not message.get("more_body", False)
        await self._send(message)

    def log(self) -> None:
        client = self._scope.get("client")
        seen = {
            "request_id": self._request_id,
            "client": f"{client[0]}:{client[1]}" if client else None,
            "method": self._scope["method"],
            "path": quote(self._scope["path"]),  # it may hold line feeds
            "status": self.status or _CLIENT_CLOSED_REQUEST,
            "duration_ms": round((time.perf_counter() - self._started_s) * 1000, 1),
            "bytes": self._bytes,
            "client_left": self._client_left,
        }
        logger.log(
            logging.DEBUG if seen["path"] in _PROBED else logging.INFO,
            '%s "%s %s" %d, %.1f ms, %d bytes%s',
            *(seen[name] for name in ("client", "method", "path", "status", "duration_ms")),
            self._bytes,
            ", the client left" if self._client_left else "",
            extra=seen,
        )


def _request_id(sent: str | None) -> str:
    return sent if sent is not None and _USABLE.fullmatch(sent) else uuid.uuid4().hex
