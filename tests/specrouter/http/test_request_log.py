"""Every request has an id and a line in the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from starlette.types import Message

from specrouter.config import ServerConfig
from specrouter.http.guards import add_guards
from specrouter.http.request_log import RequestLog
from specrouter.logs import add_request_id
from tests.specrouter.http.client import send

LOGGER = "specrouter.http.request_log"


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def service() -> RequestLog:
    app = FastAPI()

    @app.get("/id")
    async def own_id(request: Request) -> str:
        logging.getLogger("inner").info("at work")
        request_id: str = request.state.request_id
        return request_id

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield b"abc"

        return StreamingResponse(parts())

    @app.get("/broken")
    async def broken() -> None:
        raise ValueError("lost")

    add_guards(app, ServerConfig(api_keys=("key",), cors_origins=("https://page.example",)))
    return RequestLog(app)


def get(path: str, **headers: str) -> httpx.Response:
    known = {"Authorization": "Bearer key", **headers}
    return send(service(), "GET", path, headers=[*known.items()], client=("192.0.2.7", 4321))


def access_line(caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    (record,) = [record for record in caplog.records if record.name == LOGGER]
    return record


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_probes_and_scrapes_are_not_told_at_info(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    get(path)
    assert not [record for record in caplog.records if record.name == LOGGER]
    caplog.set_level(logging.DEBUG)
    get(path)
    assert access_line(caplog).levelname == "DEBUG"


@pytest.mark.parametrize("sent", ["a", "req-7/8:9", "x" * 128])
def test_usable_id_of_the_client_is_kept(sent: str) -> None:
    response = get("/id", **{"x-request-id": sent})
    assert response.json() == response.headers["x-request-id"] == sent


@pytest.mark.parametrize("sent", ["", "x" * 129, "two words", "tab\tbed", "\u00e9"])
def test_other_ids_are_replaced(sent: str) -> None:
    response = get("/id", **{"x-request-id": sent.encode("latin-1")})  # type: ignore[arg-type]
    assert response.json() == response.headers["x-request-id"] != sent
    assert len(response.json()) == 32


def test_requests_without_an_id_get_different_ones() -> None:
    assert get("/id").json() != get("/id").json()


@pytest.mark.parametrize(
    ("path", "key", "status"), [("/id", "no", 401), ("/none", "key", 404), ("/broken", "key", 500)]
)
def test_refusals_and_failures_carry_the_id_too(
    path: str, key: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    response = get(path, **{"x-request-id": "mine", "Authorization": f"Bearer {key}"})
    assert (response.status_code, response.headers["x-request-id"]) == (status, "mine")
    assert vars(access_line(caplog))["status"] == status


def test_line_says_who_asked_what_and_what_came_of_it(caplog: pytest.LogCaptureFixture) -> None:
    get("/stream?key=secret", **{"x-request-id": "mine"})
    record = access_line(caplog)
    line, message = vars(record), record.getMessage()
    who = {"request_id": "mine", "client": "192.0.2.7:4321", "method": "GET", "path": "/stream"}
    expected = {**who, "status": 200, "bytes": 9, "client_left": False}
    assert {name: line[name] for name in expected} == expected
    assert 0 < line["duration_ms"] < 60_000
    assert message.startswith('192.0.2.7:4321 "GET /stream" 200, ')
    assert "secret" not in message


def test_path_cannot_forge_a_line(caplog: pytest.LogCaptureFixture) -> None:
    get("/a%0aINFO%20forged")
    assert "\n" not in access_line(caplog).getMessage()


def test_lines_written_in_between_carry_the_id(caplog: pytest.LogCaptureFixture) -> None:
    caplog.handler.addFilter(add_request_id)
    try:
        get("/id", **{"x-request-id": "mine"})
    finally:
        caplog.handler.removeFilter(add_request_id)
    (record,) = [record for record in caplog.records if record.name == "inner"]
    assert vars(record)["request_id"] == "mine"


def test_client_that_leaves_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"abc", "more_body": True})
        assert (await receive())["type"] == "http.disconnect"

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(_: Message) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": []}
    asyncio.run(RequestLog(endless)(scope, receive, send))
    line = vars(access_line(caplog))
    assert (line["client_left"], line["bytes"], line["client"]) == (True, 3, None)
