"""What stands between the network and the service: CORS, API keys, a body limit, and the drain.

Contract: a refusal has OpenAI's error shape and reaches nothing behind it; all but those of CORS
are counted. Layers, outermost first:

    CORS        only where `server.cors_origins` names any; answers preflights itself, without a key
    keys        401, except on `OPEN_PATHS`
    body limit  413 and 408; a body is read before anything else, `max_body_bytes` at most
    drain       503 for a new generation request (POST) once the service is stopping

Pure ASGI, since streams pass through: each layer costs a call per request, and nothing per token.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from fastapi import FastAPI, Response
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modelpool.errors import ConfigError
from specrouter.config import ServerConfig, is_api_key
from specrouter.http.drain import Drain
from specrouter.http.errors import SHOULD_RETRY_HEADER, error_response
from specrouter.http.metrics_page import Refusal, count_refusal
from specrouter.http.request_log import HEADER as REQUEST_ID_HEADER

API_KEY_VARIABLE = "SPECROUTER_API_KEY"
# Probes and scrapers read without a key; the last two show the API, which is public, and no data.
OPEN_PATHS = frozenset({"/health", "/metrics", "/docs", "/openapi.json"})

# Read and thrown away before a body is refused: a client that still sends would miss the answer.
_DISCARDED_BYTES = 64 * 2**20
_BODY_S = 60.0  # for a body to arrive
_NoBody = Literal["too large", "gone"]
Count = Callable[[Refusal], None]  # told why a request was refused
_RETRY_AFTER_S = 1  # behind a balancer the next try meets another server


def add_guards(app: FastAPI, config: ServerConfig, drain: Drain | None = None) -> None:
    """Puts the layers around `app`. Raises `ConfigError` for a key that cannot be one."""
    count = partial(count_refusal, app)
    drain = drain or Drain()  # one that never begins
    app.add_middleware(DrainGate, drain=drain, count=count)
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes, drain=drain, count=count)
    keys = api_keys(config)
    if keys:
        app.add_middleware(ApiKeys, keys=keys, count=count)
        _declare_keys(app)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID_HEADER, "retry-after", SHOULD_RETRY_HEADER),
        )


def api_keys(config: ServerConfig) -> tuple[str, ...]:
    """The configured keys and that of the environment; none: the service is open to all.

    Raises `ConfigError` for a variable that is set and holds no key: who set it wants a lock.
    """
    own = os.environ.get(API_KEY_VARIABLE)
    if own is None:
        return config.api_keys
    if not is_api_key(own):
        raise ConfigError(API_KEY_VARIABLE, "must be printable ASCII without spaces, or unset")
    return (*config.api_keys, own)


def _declare_keys(app: FastAPI) -> None:
    """In the API's schema, by which `/docs` and generated clients know to ask for a key."""
    undeclared = app.openapi

    def declared() -> dict[str, Any]:
        schema = undeclared()
        schemes = schema.setdefault("components", {}).setdefault("securitySchemes", {})
        schemes["api_key"] = {"type": "http", "scheme": "bearer"}
        schema["security"] = [{"api_key": []}]
        for path in OPEN_PATHS & schema["paths"].keys():
            for operation in schema["paths"][path].values():
                operation["security"] = []
        return schema

    app.openapi = declared  # type: ignore[method-assign]  # as FastAPI's documentation has it


class ApiKeys:
    """401 without `Authorization: Bearer KEY`, one of `keys`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], count: Count) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        self._count("unauthorized")
        refusal = error_response(
            401,
            # OpenAI's words: LiteLLM knows a refused key by them, and by nothing else.
            "Incorrect API key provided, or none: send Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refusal(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        sent = given.strip().encode("latin-1")
        # Against every key, each in constant time: how long it takes tells nothing.
        matches = [hmac.compare_digest(sent, key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)


class BodyLimit:
    """413 for a body of more than `max_bytes`, declared or counted as it comes; 408 for one that
    does not come. It is in nobody's way: the service stops without it, with 503 for its client."""

    def __init__(self, app: ASGIApp, max_bytes: int, drain: Drain, count: Count) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._drain = drain
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with self._drain.arrival(_BODY_S):
                body = await _body(self._max_bytes, scope, receive)
        except TimeoutError:
            await self._late()(scope, receive, send)
            return
        if isinstance(body, bytes):
            await self._app(scope, _replay(body, receive), send)
        elif body == "too large":
            self._count("bad_request")
            refusal = error_response(
                413,
                f"the body has more than {self._max_bytes} bytes (server.max_body_bytes)",
                code="request_too_large",
                headers={"Connection": "close"},
            )
            await refusal(scope, receive, send)

    def _late(self) -> Response:
        if self._drain.is_draining:
            self._count("unavailable")
            return _shutting_down()
        self._count("bad_request")
        return error_response(
            408,
            f"the body did not arrive within {_BODY_S:g} s",
            code="body_timeout",
            headers={"Connection": "close"},
        )


class DrainGate:
    """Counts POSTs while they are in flight; 503 for new ones once the service drains."""

    def __init__(self, app: ASGIApp, drain: Drain, count: Count) -> None:
        self._app = app
        self._drain = drain
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
        elif self._drain.is_draining:
            self._count("unavailable")
            await _shutting_down()(scope, receive, send)
        else:
            with self._drain.flight():
                await self._app(scope, receive, send)


def _shutting_down() -> Response:
    return error_response(
        503,
        "the service is shutting down and takes no new requests",
        code="shutting_down",
        headers={"Retry-After": str(_RETRY_AFTER_S), "Connection": "close"},
    )


async def _body(limit: int, scope: Scope, receive: Receive) -> bytes | _NoBody:
    """The whole body, of at most `limit` bytes, or why there is none; "gone" is the client."""
    chunks, count = list[bytes](), 0
    declared = _declared_bytes(scope)
    if declared is not None and declared > limit + _DISCARDED_BYTES:
        return "too large"
    while count <= limit + _DISCARDED_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            return "gone"
        chunk = message.get("body", b"")
        count += len(chunk)
        if count <= limit:
            chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks) if count <= limit else "too large"
    return "too large"


def _declared_bytes(scope: Scope) -> int | None:
    declared = Headers(scope=scope).get("content-length", "")
    return int(declared) if declared.isascii() and declared.isdigit() else None


def _replay(body: bytes, receive: Receive) -> Receive:
    """`receive` of a request whose body has been read: the body, then what comes next."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed
