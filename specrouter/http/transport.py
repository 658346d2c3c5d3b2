"""Limits of connections: the size of a header, the time for it to arrive, and their number.

Contract: nothing here depends on what the application does, so that it holds while the application
is busy. A header (the request line included, and trailers after a chunked body) of more than
`MAX_HEADER_BYTES` is answered with 431, one that has not ended after `HEADER_S` seconds with 408,
and invalid HTTP with 400, each in the service's error shape; the connection is closed then. Beyond
`limit_concurrency` connections, the one that has waited longest for its request to arrive is closed
without an answer; a connection whose request is being answered never is.

A request that offers to upgrade, as Java's clients and `curl --http2` do to HTTP/2, is served in
HTTP/1.1, since a server may ignore the offer (RFC 9110, section 7.8). The parser stops at such a
header; a new parser gets the request again, without the offer.

An HTTP/1.0 client, such as nginx by default, does not support chunks (RFC 9112, section 7): an
answer without a length ends with its connection.

A subclass of uvicorn's protocol, since uvicorn has no setting for the time of a header, nor a limit
of connections that exempts probes, and with httptools none for a header's size. With h11 it has the
last, but a streamed chunk costs twice as much. Its tests run with the oldest and newest releases:
`python -m checks.versions`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from functools import partial
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from specrouter.config import ServerConfig
from specrouter.http.answers import error_payload

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 2**16
HEADER_S = 15.0  # time for a header to arrive, since the connection or the header began
_SLICE = 2**16  # bytes per parser call: each call joins all pieces of a header again
_LINGER_S = 2.0  # a client that still sends would miss the answer if the connection were closed
_OFFERS = (b"connection", b"upgrade", b"http2-settings")  # headers that offer another protocol
_OTHER_FILES = 128  # files that the process may open beside connections


def protocol_settings(config: ServerConfig) -> dict[str, Any]:
    """Return arguments of `uvicorn.Config`."""
    return {
        "http": BoundedProtocol,
        "ws": "none",
        "limit_concurrency": _within_file_limit(config.limit_concurrency),
    }


class BoundedProtocol(HttpToolsProtocol):
    """Connection with the limits that the module describes."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # uvicorn would answer 503 beyond it, also to probes.
        self._most_connections, self.limit_concurrency = self.limit_concurrency, None
        self._clock: asyncio.TimerHandle | None = None
        self._waits_since_s = 0.0
        self._is_in_header = False
        self._is_refused = False
        self._header_bytes = 0  # size of a header or trailers, after the piece in which they began
        self._is_offer_gone = False  # the request is parsed again without its offer

    @property
    def is_waiting(self) -> bool:
        """True if the connection waits for a request, or for the rest of one."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return True
        return cycle.more_body and not cycle.response_started

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waits_since_s = time.monotonic()  # uvloop's clock counts milliseconds
        self._start_clock()
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _SLICE):
            if self._is_refused or self.transport.is_closing():
                return
            piece = data[start : start + _SLICE]
            self._header_bytes += len(piece)
            self._feed(piece)
            if self._header_bytes > MAX_HEADER_BYTES and not self._is_refused:
                self._refuse_header()
        if not self._is_refused and (self._is_in_header or self._is_answered()):
            self._start_clock()

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            if not self._is_refused:
                self._refuse(400, "invalid_http", "Invalid HTTP request received.")
        except httptools.HttpParserUpgrade as upgrade:
            if self._offers():
                self._feed_without_offer(data[upgrade.args[0] :])

    def _offers(self) -> bool:
        """Return whether the request whose header has been read offers another protocol."""
        asked: bool = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        return asked and not self._is_offer_gone

    def _feed_without_offer(self, rest: bytes) -> None:
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [name + b": " + value for name, value in self.headers if name not in _OFFERS]
        self.parser = httptools.HttpRequestParser(self)
        self._is_offer_gone = True
        self._feed(b"\r\n".join([*lines, b"", rest]))

    def on_message_begin(self) -> None:
        self._is_in_header, self._header_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._offers():
            return
        self._is_in_header, self._header_bytes = False, 0
        self._stop_clock()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MAX_HEADER_BYTES:
            self._refuse_header()
        elif sum(name == b"host" for name, _ in self.headers) > 1:
            self._refuse(400, "invalid_http", "the request has more than one Host header")
        if self._is_refused:
            raise ValueError("refused")  # the parser stops
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            self.cycle.chunked_encoding = False
            self.cycle.send = partial(_send_without_chunks, self.cycle, self.cycle.send)  # type: ignore[method-assign]

    def on_body(self, body: bytes) -> None:
        self._header_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offers():
            return
        self._is_offer_gone = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._waits_since_s = time.monotonic()
        super().on_response_complete()

    def _refuse_header(self) -> None:
        message = f"the header has more than {MAX_HEADER_BYTES} bytes"
        self._refuse(431, "header_too_large", message)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._is_refused = True
        self._stop_clock()
        logger.info("%s: %d, %s", self.client, status, message)
        if not self._is_answered():  # another answer would corrupt the one that is being sent
            self.transport.close()
            return
        body = json.dumps(error_payload(status, message, code=code)).encode()
        head = (
            b"content-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n" % len(body)
        )
        self.transport.write(STATUS_LINE[status] + head + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.abort)

    def _is_answered(self) -> bool:
        """Return whether every request so far has been answered."""
        return self.cycle is None or self.cycle.response_complete

    def _start_clock(self) -> None:
        if self._clock is None:
            self._clock = self.loop.call_later(HEADER_S, self._late)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _late(self) -> None:
        self._clock = None
        if not self._is_answered():  # reading pauses while an earlier request is answered
            return
        if self._is_in_header:
            self._refuse(408, "header_timeout", f"the header did not arrive within {HEADER_S:g} s")
        else:
            self.transport.close()

    def _make_room(self) -> None:
        """Close the connection that has waited longest, if there are too many."""
        most = self._most_connections
        if most is None or len(self.connections) <= most:
            return
        others = (one for one in self.connections if isinstance(one, BoundedProtocol))
        waiting = [one for one in others if one.is_waiting and one is not self]
        if waiting:
            min(waiting, key=lambda one: one._waits_since_s).transport.abort()


async def _send_without_chunks(cycle: RequestResponseCycle, send: Any, message: Any) -> None:
    if message["type"] == "http.response.body":  # uvicorn compares the body with this length
        cycle.expected_content_length = len(message.get("body", b""))
    await send(message)


def _within_file_limit(connections: int) -> int:
    """Return `connections`, or fewer if the process may not open as many files.

    Its own limit is raised as far as it is allowed to.
    """
    try:
        import resource  # not on every platform
    except ImportError:
        return connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    allowed = max(soft - _OTHER_FILES, 1)
    logger.warning("at most %d connections: the process may open %d files only", allowed, soft)
    return allowed
