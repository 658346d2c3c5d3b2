"""Middleware between the network and the service: CORS, API keys, limits, and the drain.

Contract: a refusal has OpenAI's error shape, and the layers behind it do not see the request; all
refusals but those of CORS are counted. Layers, outermost first:

    CORS        only if `server.cors_origins` names any; answers preflights itself, without a key
    concurrency 503 for a request beyond `limit_concurrency`, except on `PROBE_PATHS`
    page        403 on the page's paths for a request that may be of another page's script; on a
                service without keys that listens on loopback only, on all but `PROBE_PATHS`
    keys        401, except on `OPEN_PATHS`
    body limit  413, 408 and 503; a body is read before anything else, and a new generation request
                (POST) is refused once the service is stopping (`body_limit`)

Pure ASGI, since streams pass through: each layer costs a call per request, and nothing per token.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Collection, Sequence
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from specrouter.config import ServerConfig
from specrouter.http.answers import error_response, overloaded
from specrouter.http.body_limit import BodyLimit
from specrouter.http.drain import Drain
from specrouter.http.errors import SHOULD_RETRY_HEADER
from specrouter.http.keys import api_keys, is_loopback
from specrouter.http.live_feed import FEED_PATH
from specrouter.http.live_page import PAGE_PATHS
from specrouter.http.prometheus import count_refusal
from specrouter.http.request_log import HEADER as REQUEST_ID_HEADER

PROBE_PATHS = frozenset({"/health", "/metrics"})
# Probes and scrapers have no key; the other paths show the API, which is public, and no data.
OPEN_PATHS = PROBE_PATHS | PAGE_PATHS | {"/docs", "/openapi.json"}


def add_guards(app: FastAPI, config: ServerConfig, drain: Drain | None = None) -> None:
    """Add the layers around `app`, or raise `ConfigError` for an invalid key."""
    app.add_middleware(
        BodyLimit,
        max_bytes=config.max_body_bytes,
        max_inflight_bytes=config.max_inflight_body_bytes,
        drain=drain or Drain(),  # the default never drains
    )
    keys = api_keys(config)
    is_open = not keys and is_loopback(config.host)
    if keys:
        app.add_middleware(api_keys_guard, keys=keys)
        _declare_keys(app)
    hosts = {config.host, socket.gethostname(), "localhost", *config.page_hosts}
    names = frozenset(map(str.lower, hosts))
    app.add_middleware(page_guard, hosts=names, is_open=is_open)
    app.add_middleware(concurrency_limit, most=config.limit_concurrency)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID_HEADER, "retry-after", SHOULD_RETRY_HEADER),
        )


def _declare_keys(app: FastAPI) -> None:
    """Declare keys in the API's schema, so that `/docs` and generated clients ask for one."""
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

    app.openapi = declared  # type: ignore[method-assign]  # as FastAPI documents it


def api_keys_guard(app: ASGIApp, keys: Sequence[str]) -> ASGIApp:
    """Return `app` behind a guard: 401 without `Authorization: Bearer KEY`, one of `keys`."""
    known = [key.encode() for key in keys]

    def is_known(scope: Scope) -> bool:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        sent = given.strip().encode("latin-1")
        # Every key is compared, in constant time, so that the duration reveals nothing.
        matches = [hmac.compare_digest(sent, key) for key in known]
        return scheme.lower() == "bearer" and any(matches)

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or is_known(scope):
            await app(scope, receive, send)
            return
        count_refusal(scope["app"], "unauthorized")
        refusal = error_response(
            401,
            # OpenAI's words, by which alone LiteLLM recognizes a refused key.
            "Incorrect API key provided, or none: send Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refusal(scope, receive, send)

    return guarded


def page_guard(app: ASGIApp, hosts: Collection[str], is_open: bool) -> ASGIApp:
    """Return `app` behind a guard: 403 on the page's paths for requests of another page.

    Such a page has a name that resolves to this address (DNS rebinding), or another origin.

    Args:
        app: the layers behind the guard.
        hosts: names of this service, beside all IP addresses.
        is_open: only its address protects the service, and such a name resolves to it, so the name
            is checked on every path. The origin is not: `server.cors_origins` says which may ask.
    """

    def is_page(path: str) -> bool:
        return path in PAGE_PATHS or path == FEED_PATH

    def refusal(path: str, headers: Headers) -> str | None:
        host = headers.get("host", "")  # all browsers send it
        if not _is_own(host, hosts) and (host or is_page(path)):
            return f"{host!r} is no name of this service: add it to server.page_hosts"
        if not is_page(path):
            return None
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            return f"a page of {origin} may not read this one"
        # Browsers send this where they send no Origin. Links of other sites to the page are fine.
        if path == FEED_PATH and headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            return "another page may not read this one"
        return None

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else None
        if path is not None and (is_page(path) or (is_open and path not in PROBE_PATHS)):
            reason = refusal(path, Headers(scope=scope))
            if reason is not None:
                count_refusal(scope["app"], "unauthorized")
                await error_response(403, reason, code="not_this_page")(scope, receive, send)
                return
        await app(scope, receive, send)

    return guarded


def _is_own(host: str, names: Collection[str]) -> bool:
    """Return whether a `Host` header, with or without a port, names this service or an IP."""
    name = host.lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        # Such a name cannot be registered; containers reach this machine as host.docker.internal.
        return name in names or name.endswith((".localhost", ".internal"))
    return True


def concurrency_limit(app: ASGIApp, most: int) -> ASGIApp:
    """Return `app` behind a limit: 503 beyond `most` requests at a time, except for probes."""
    running = 0

    async def limited(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal running
        if scope["type"] != "http" or scope["path"] in PROBE_PATHS:
            await app(scope, receive, send)
        elif running >= most:
            count_refusal(scope["app"], "overloaded")
            message = f"{most} requests are being answered already (server.limit_concurrency)"
            await overloaded(message, Connection="close")(scope, receive, send)
        else:
            running += 1
            try:
                await app(scope, receive, send)
            finally:
                running -= 1

    return limited
