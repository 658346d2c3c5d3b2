"""Bodies within bounds, alone and together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.specrouter.http.client import connected
from tests.specrouter.http.test_guards import LIMIT, call, error_code, guarded, half_sent

INFLIGHT = 3 * 2**16


async def in_chunks(size: int, count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b"x" * size


@pytest.mark.parametrize("size", [0, 1, LIMIT])
@pytest.mark.parametrize("in_one", [True, False])
def test_body_within_the_limit_arrives_whole(size: int, in_one: bool) -> None:
    content = b"x" * size if in_one else in_chunks(size // 10, 10)
    app = guarded(max_body_bytes=LIMIT)
    assert call(app, content=content).text == "x" * (size if in_one else size // 10 * 10)


@pytest.mark.parametrize("declared", [LIMIT + 1, None, 5])
def test_larger_body_is_refused_before_the_application_sees_it(declared: int | None) -> None:
    app = guarded(max_body_bytes=LIMIT)
    content = b"x" * declared if declared == LIMIT + 1 else in_chunks(LIMIT // 2, 5)
    headers = [("Content-Length", "5")] if declared == 5 else []  # which is false
    response = call(app, content=content, headers=headers)
    assert (response.status_code, error_code(response)) == (413, "request_too_large")
    assert str(LIMIT) in response.json()["error"]["message"]
    assert app.state.calls == 0


def test_endless_body_is_refused_before_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specrouter.http.body_limit._DISCARDED_BYTES", LIMIT)
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1
            yield b"x" * LIMIT

    assert call(guarded(max_body_bytes=LIMIT), content=endless()).status_code == 413
    assert sent < 10


def test_client_that_leaves_while_it_sends_reaches_nothing() -> None:
    app = guarded()
    sent: list[Any] = []
    more = {"type": "http.request", "body": b"x", "more_body": True}
    messages = iter([more, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message)

    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/generate", "headers": []}
    scope["query_string"] = b""
    asyncio.run(app(scope, receive, send))
    assert (sent, app.state.calls) == ([], 0)


def test_body_that_does_not_come_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specrouter.http.body_limit._BODY_S", 0.01)
    app = guarded()
    response = call(app, content=half_sent())
    assert (response.status_code, error_code(response)) == (408, "body_timeout")
    assert response.headers["Connection"] == "close"
    assert app.state.calls == 0


def test_bodies_that_are_too_large_together_are_refused_and_small_ones_are_not() -> None:
    """Two large ones wait for their ends; a third has no room until one of them is answered."""
    app = guarded(max_inflight_body_bytes=INFLIGHT, max_body_bytes=INFLIGHT)
    large, ends = b"x" * (INFLIGHT // 2), [asyncio.Event(), asyncio.Event()]

    async def held(end: asyncio.Event) -> AsyncIterator[bytes]:
        yield large
        await end.wait()
        yield b""

    async def test() -> None:
        async with connected(app) as client:
            first = [asyncio.ensure_future(client.post("/a", content=held(end))) for end in ends]
            while app.state.calls == 0:
                ends[0].set()
                await asyncio.sleep(0)
            assert (await first[0]).text == large.decode()
            assert (await client.post("/a", content=large)).status_code == 200
            [refused, small] = [
                await client.post("/a", content=content) for content in (large + b"x", b"x")
            ]
            assert (refused.status_code, error_code(refused)) == (503, "overloaded")
            assert int(refused.headers["Retry-After"]) >= 1
            assert small.status_code == 200
            ends[1].set()
            assert (await first[1]).status_code == 200
            assert (await client.post("/a", content=large * 2)).status_code == 200

    asyncio.run(test())


def test_a_body_for_which_there_is_no_room_leaves_what_it_had() -> None:
    app = guarded(max_inflight_body_bytes=INFLIGHT, max_body_bytes=INFLIGHT)
    began, end = asyncio.Event(), asyncio.Event()

    async def held() -> AsyncIterator[bytes]:
        yield b"x" * (INFLIGHT // 3 + 1)
        began.set()
        await end.wait()

    async def test() -> None:
        async with connected(app) as client:
            first = asyncio.ensure_future(client.post("/a", content=held()))
            await began.wait()
            refused = await client.post("/a", content=in_chunks(INFLIGHT // 6, 4))
            assert (refused.status_code, error_code(refused)) == (503, "overloaded")
            end.set()
            assert (await first).status_code == 200
            assert (await client.post("/a", content=b"x" * INFLIGHT)).status_code == 200

    asyncio.run(test())


@pytest.mark.parametrize("reason", ["too large", "late", "gone"])
def test_a_refused_body_leaves_its_room_to_others(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specrouter.http.body_limit._BODY_S", 0.01)
    app = guarded(max_inflight_body_bytes=INFLIGHT, max_body_bytes=INFLIGHT)
    size = 2 * INFLIGHT if reason == "too large" else INFLIGHT - 1

    async def body() -> AsyncIterator[bytes]:
        yield b"x" * size
        if reason == "gone":
            raise ConnectionResetError
        if reason == "late":
            await asyncio.sleep(60)

    if reason == "gone":
        with pytest.raises(ConnectionResetError):
            call(app, content=body())
    else:
        status = {"too large": 413, "late": 408}[reason]
        assert call(app, content=body()).status_code == status
    assert app.state.calls == 0
    assert call(app, content=b"x" * INFLIGHT).status_code == 200
