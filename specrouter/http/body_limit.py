"""BodyLimit: reads the whole body of a request, within limits, before the application sees it.

Contract: a body of more than `max_bytes` is refused with 413, one that does not arrive in time with
408, and one with which all bodies together would be too large with 503. The rest of a refused body
is read and thrown away unless it is too long: a client that still sends would miss the answer. A
POST is in flight once its body has been read; if the service drains, it is refused with 503.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Literal

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specrouter.http.answers import error_response, overloaded, shutting_down
from specrouter.http.drain import Drain
from specrouter.http.prometheus import count_refusal

SMALL_BYTES = 2**16  # smaller bodies are not counted: connections are limited
_DISCARDED_BYTES = 64 * 2**20  # beyond the limit, so many are read and thrown away
_BODY_S = 60.0  # time for a body to arrive
_Missing = Literal["too large", "no room", "gone", "late"]


class BodyLimit:
    """Middleware that limits the size of bodies, alone and together, and their time to arrive.

    A body that is still arriving does not delay the end of the service: its client gets 503.
    `room`: bytes that are left for bodies that are read or wait for an answer.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_inflight_bytes: int, drain: Drain) -> None:
        self._app = app
        self.max_bytes = max_bytes
        self.room = max_inflight_bytes
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arriving = _Arriving(self)
        try:
            await self._serve(arriving, scope, receive, send)
        finally:
            arriving.release()

    async def _serve(self, arriving: _Arriving, scope: Scope, receive: Receive, send: Send) -> None:
        body: bytes | _Missing = "late"
        is_request = scope["method"] == "POST"
        with suppress(TimeoutError):
            async with self._drain.arrival(_BODY_S):
                body = await arriving.read(scope, receive)
        if self._drain.is_draining and (body == "late" or (is_request and isinstance(body, bytes))):
            count_refusal(scope["app"], "unavailable")
            await shutting_down()(scope, receive, send)
        elif isinstance(body, bytes):
            answer = arriving.released_by(send) if arriving.held else send
            with self._drain.flight() if is_request else nullcontext():
                await self._app(scope, _replay(body, receive), answer)
        elif body == "no room":
            message = (
                "the bodies of all requests together are too large now "
                "(server.max_inflight_body_bytes)"
            )
            count_refusal(scope["app"], "overloaded")
            await overloaded(message)(scope, receive, send)
        elif body != "gone":
            status, code = 413, "request_too_large"
            message = f"the body has more than {self.max_bytes} bytes (server.max_body_bytes)"
            if body == "late":
                status, code = 408, "body_timeout"
                message = f"the body did not arrive within {_BODY_S:g} s"
            count_refusal(scope["app"], "bad_request")
            refusal = error_response(status, message, code=code, headers={"Connection": "close"})
            await refusal(scope, receive, send)


class _Arriving:
    """Body that arrives; `held`: bytes of the room that it takes."""

    def __init__(self, limits: BodyLimit) -> None:
        self._limits = limits
        self.held = 0

    async def read(self, scope: Scope, receive: Receive) -> bytes | _Missing:
        """Return the whole body, or why there is none ("gone": the client left)."""
        chunks, count = list[bytes](), 0
        missing: _Missing | None = None
        most = self._limits.max_bytes + _DISCARDED_BYTES
        if _declared_bytes(scope) > most:
            return "too large"
        while count <= most:
            message = await receive()
            if message["type"] == "http.disconnect":
                return "gone"
            chunk = message.get("body", b"")
            count += len(chunk)
            missing = missing or self._objection(count)
            if missing is None:
                chunks.append(chunk)
            elif chunks:
                chunks.clear()
                self.release()
            if not message.get("more_body", False):
                return missing or b"".join(chunks)
        return "too large"

    def _objection(self, count: int) -> _Missing | None:
        """Return why a body of `count` bytes so far is refused, or take room for it."""
        if count > self._limits.max_bytes:
            return "too large"
        if count > SMALL_BYTES:
            if count - self.held > self._limits.room:
                return "no room"
            self._limits.room -= count - self.held
            self.held = count
        return None

    def release(self) -> None:
        self._limits.room += self.held
        self.held = 0

    def released_by(self, send: Send) -> Send:
        """Return `send`, which also releases the room: the request has been read by then."""

        async def answered(message: Message) -> None:
            self.release()
            await send(message)

        return answered


def _declared_bytes(scope: Scope) -> int:
    declared = Headers(scope=scope).get("content-length", "")
    return int(declared) if declared.isascii() and declared.isdigit() else 0


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that repeats the body that was read, and then goes on."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed
