"""Connections before there is a request, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from specrouter.config import ServerConfig
from specrouter.http import transport
from specrouter.http.transport import MAX_HEADER_BYTES, BoundedProtocol, protocol_settings

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
GET = b"GET /a HTTP/1.1\r\nHost: x\r\n"


class Served:
    """An application on a free port; `release` ends the answers of `/slow`."""

    def __init__(self, limit_concurrency: int = 100) -> None:
        self.release = asyncio.Event()
        self.bodies: list[bytes] = []
        settings = protocol_settings(ServerConfig(limit_concurrency=limit_concurrency))
        self._config = uvicorn.Config(self._app, interface="asgi3", log_config=None, **settings)
        self.state = ServerState()
        self._port = 0

    async def listen(self) -> asyncio.Server:
        server = await asyncio.get_running_loop().create_server(
            lambda: BoundedProtocol(self._config, self.state, {}), "127.0.0.1", 0
        )
        self._port = server.sockets[0].getsockname()[1]
        return server

    async def connect(self) -> Streams:
        return await asyncio.open_connection("127.0.0.1", self._port)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            if not message["more_body"]:
                break
        self.bodies.append(body)
        if scope["path"] == "/slow":
            await self.release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part, goes_on in ((b"we", True), (b"ll", False)):
            await send({"type": "http.response.body", "body": part, "more_body": goes_on})


def serving(test: Callable[[Served], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        served = Served(**options)
        async with asyncio.timeout(20), await served.listen():
            await test(served)
            served.release.set()
            for connection in list(served.state.connections):
                connection.transport.abort()
            await asyncio.sleep(0)

    asyncio.run(run())


async def answer(streams: Streams) -> tuple[int, dict[str, Any]]:
    """Status and error of an answer behind which the connection is closed."""
    head, _, body = (await streams[0].read()).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


async def is_cut(streams: Streams) -> bool:
    """Closed without an answer."""
    try:
        return await streams[0].read() == b""
    except ConnectionResetError:
        return True


async def sent(served: Served, data: bytes) -> Streams:
    reader, writer = await served.connect()
    writer.write(data)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize(
    "header",
    [
        GET + b"X: " + b"y" * 3 * MAX_HEADER_BYTES,  # it does not end
        GET + b"X: " + b"y" * MAX_HEADER_BYTES + b"\r\n\r\n",
        GET + b"X: y\r\n" * (MAX_HEADER_BYTES // 5) + b"\r\n",
        b"GET /" + b"y" * MAX_HEADER_BYTES + b" HTTP/1.1\r\n\r\n",
    ],
)
def test_a_header_beyond_the_limit_is_a_431(header: bytes) -> None:
    async def test(served: Served) -> None:
        status, error = await answer(await sent(served, header))
        assert (status, error["code"]) == (431, "header_too_large")
        assert served.bodies == []

    serving(test)


def test_what_is_sent_behind_a_refused_header_is_thrown_away() -> None:
    async def test(served: Served) -> None:
        reader, writer = await sent(served, GET + b"X: ")
        for _ in range(64):
            writer.write(b"y" * 2**18)
            await writer.drain()
        assert (await answer((reader, writer)))[0] == 431

    serving(test)


def test_trailers_count_as_header() -> None:
    async def test(served: Served) -> None:
        chunked = b"POST /slow HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"
        assert await is_cut(await sent(served, chunked + b"X: " + b"y" * 4 * MAX_HEADER_BYTES))

    serving(test)


def test_a_header_within_the_limit_and_any_body_are_taken() -> None:
    async def test(served: Served) -> None:
        header = b"X: " + b"y" * (MAX_HEADER_BYTES - 1000) + b"\r\n"
        body = b"z" * 5 * MAX_HEADER_BYTES
        head = GET.replace(b"GET", b"POST") + header + b"Content-Length: %d\r\n\r\n" % len(body)
        chunks = b"".join(b"1\r\nz\r\n" for _ in body) + b"0\r\n\r\n"
        chunked = b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        for data in (head + body, chunked + chunks):
            reader, _ = await sent(served, data)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert served.bodies == [body, body]

    serving(test)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x16\x03\x01 nonsense\r\n\r\n", ""),
        (b"GET / HTTP/1.1\r\nHost: a\r\nhOST: b\r\n\r\n", "more than one Host"),
    ],
)
def test_what_is_no_http_and_two_hosts_are_a_400_in_the_shape_of_the_service(
    data: bytes, said: str
) -> None:
    async def test(served: Served) -> None:
        status, error = await answer(await sent(served, data))
        assert (status, error["code"]) == (400, "invalid_http")
        assert said in error["message"]

    serving(test)


def test_a_header_that_does_not_end_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HEADER_S", 0.1)

    async def test(served: Served) -> None:
        silent, half = await sent(served, b""), await sent(served, GET)
        again = await sent(served, GET + b"\r\n")
        await again[0].readuntil(b"0\r\n\r\n")
        again[1].write(GET)  # on a connection that has served one
        for streams in (half, again):
            status, error = await answer(streams)
            assert (status, error["code"]) == (408, "header_timeout")
        assert await is_cut(silent)

    serving(test)


def test_an_answer_may_take_longer_than_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HEADER_S", 0.05)

    async def test(served: Served) -> None:
        first = GET.replace(b"/a", b"/slow") + b"\r\n"
        reader, _ = await sent(served, first + GET)  # and half of another one
        await asyncio.sleep(0.2)
        served.release.set()
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")

    serving(test)


def test_beyond_the_limit_those_who_wait_longest_give_way() -> None:
    async def test(served: Served) -> None:
        slow = await sent(served, GET.replace(b"/a", b"/slow") + b"\r\n")
        body = await sent(served, GET + b"Content-Length: 9\r\n\r\nabc")
        half, newest = await sent(served, GET), await sent(served, GET)
        fresh = []
        for loser in (body, half):
            fresh.append(await sent(served, GET + b"\r\n"))
            assert (await fresh[-1][0].readline()).startswith(b"HTTP/1.1 200")
            assert await is_cut(loser)
        served.release.set()
        assert (await slow[0].readline()).startswith(b"HTTP/1.1 200")
        assert not newest[0].at_eof()

    serving(test, limit_concurrency=4)


def test_limits_within_what_the_process_may_open(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource  # not everywhere

    limits = [(256, 300)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    assert protocol_settings(ServerConfig(limit_concurrency=500))["limit_concurrency"] == 300 - 128
    assert limits[-1] == (300, 300)
    assert protocol_settings(ServerConfig(limit_concurrency=100))["limit_concurrency"] == 100


OFFER = (
    b"POST /a HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: AAMAAABkAAQAAP__\r\nContent-Length: 4\r\n\r\n"
)


@pytest.mark.parametrize("cut", [0, 1, 30, len(OFFER) - 1, len(OFFER), len(OFFER) + 2])
def test_a_request_that_offers_another_protocol_is_served_with_its_body(cut: int) -> None:
    """As Java's clients and curl --http2 send it, in one piece and in two; and then another."""

    async def test(served: Served) -> None:
        whole = OFFER + b"body"
        reader, writer = await sent(served, whole[:cut])
        await asyncio.sleep(0.01)
        for data in (whole[cut:], OFFER + b"more"):
            writer.write(data)
            assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert served.bodies == [b"body", b"more"]

    serving(test)


def test_a_websocket_is_answered_like_any_request_and_connect_ends() -> None:
    async def test(served: Served) -> None:
        offer = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: eA==\r\n\r\n"
        reader, _ = await sent(served, GET + offer)
        assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")
        reader, writer = await sent(served, b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n")
        writer.write_eof()
        await reader.read()

    serving(test)


@pytest.mark.parametrize("connection", [b"", b"Connection: keep-alive\r\n"])
def test_a_client_of_http_1_0_gets_no_chunks_and_the_end_of_the_connection(
    connection: bytes,
) -> None:
    async def test(served: Served) -> None:
        streams = await sent(served, b"GET /a HTTP/1.0\r\n" + connection + b"\r\n")
        head, _, body = (await streams[0].read()).partition(b"\r\n\r\n")
        assert body == b"well"
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head

    serving(test)
