"""A client of the service in front of a router, in one process."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import ASGIApp

from specrouter import ChainRouter
from specrouter.cli.main import main
from specrouter.config import ServerConfig
from specrouter.http.app import create_app
from specrouter.http.drain import Drain
from specrouter.http.guards import add_guards
from tests.specrouter.fake_router import FakeRouter
from tests.specrouter.faults import PATIENCE_S, wait_until

Headers = Sequence[tuple[str, str]]

# The endpoints that make texts, each with a body that is answered.
BODIES: Mapping[str, dict[str, Any]] = {
    "/generate": {"prompt": "def f"},
    "/v1/completions": {"prompt": "def f"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
}

UNASKED = FakeRouter()  # of requests that are refused before: hundreds, which share one app


def app_of(router: FakeRouter | ChainRouter, drain: Drain | None = None) -> FastAPI:
    return _refusing() if router is UNASKED else create_app(cast(ChainRouter, router), drain)


@cache
def _refusing() -> FastAPI:
    return create_app(cast(ChainRouter, UNASKED))


def service(router: FakeRouter | None = None, drain: Drain | None = None, **server: Any) -> FastAPI:
    """The whole application, with its guards."""
    app = create_app(cast(ChainRouter, router or FakeRouter(server=server)), drain)
    add_guards(app, ServerConfig(**server), drain)
    return app


def configured(router: ChainRouter, patch: pytest.MonkeyPatch, **server: Any) -> ChainRouter:
    """The same router, whose service has this configuration."""
    config = router.config.model_copy(update={"server": ServerConfig(**server)})
    patch.setattr(router, "config", config)
    return router


def post(
    router: FakeRouter | ChainRouter, body: Any, path: str = "/generate", headers: Headers = ()
) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return request(router, "POST", path, content, headers)


def answer_of(router: FakeRouter | ChainRouter, path: str, body: Any) -> dict[str, Any]:
    response = post(router, body, path)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def request(
    router: FakeRouter | ChainRouter,
    method: str,
    path: str,
    content: bytes | None = None,
    headers: Headers = (),
    drain: Drain | None = None,
) -> httpx.Response:
    sent = [("Content-Type", "application/json"), *headers]
    return send(app_of(router, drain), method, path, content, sent)


def send(
    app: ASGIApp,
    method: str,
    path: str,
    content: bytes | AsyncIterator[bytes] | None = None,
    headers: Sequence[tuple[str, Any]] = (),
    **transport: Any,
) -> httpx.Response:
    """`transport`: options of `httpx.ASGITransport`."""
    options = {"raise_app_exceptions": False, **transport}

    async def sent() -> httpx.Response:
        async with connected(app, **options) as client:
            return await client.request(method, path, content=content, headers=list(headers))

    return asyncio.run(sent())


def connected(app: ASGIApp, **transport: Any) -> httpx.AsyncClient:
    transport_ = httpx.ASGITransport(cast(Any, app), **transport)
    return httpx.AsyncClient(transport=transport_, base_url="http://localhost")


@dataclass(frozen=True)
class Call:
    arguments: tuple[Any, ...]
    result: Any
    in_loop: bool  # the event loop's thread made it


def noted(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[Call]:
    """The calls of a function or method from now on, which does what it did."""
    calls, original = list[Call](), getattr(owner, name)

    def called(*arguments: Any) -> Any:
        result = original(*arguments)
        in_loop = threading.current_thread() is threading.main_thread()
        calls.append(Call(arguments, result, in_loop))
        return result

    monkeypatch.setattr(owner, name, called)
    return calls


class Page:
    """The families of `/metrics` by the names that queries use, but for endings of histograms."""

    def __init__(self, app: FastAPI) -> None:
        response = send(app, "GET", "/metrics")
        assert response.status_code == 200
        self.families: dict[str, Metric] = {}
        for family in text_string_to_metric_families(response.text):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            assert name not in self.families
            self.families[name] = family

    def values(self, series: str) -> dict[tuple[str, ...], float]:
        """By the values of the labels, in the order of their names."""
        return {
            tuple(value for _, value in sorted(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == series
        }

    def value(self, series: str, *labels: str) -> float:
        return self.values(series)[labels]

    def total(self, series: str) -> float:
        return sum(self.values(series).values())


def with_value(place: str, value: Any) -> dict[str, Any]:
    """Fields of a body: `{"a": {"b": value}}` for the place `a.b`."""
    for name in reversed(place.split(".")):
        value = {name: value}
    fields: dict[str, Any] = value
    return fields


def cases(values: Mapping[str, Sequence[Any]]) -> list[tuple[dict[str, Any], str]]:
    """Fields of bodies and the place of the bad one, from the bad values of each place."""
    return [(with_value(place, one), place) for place, bad in values.items() for one in bad]


def refusal(response: httpx.Response) -> dict[str, Any]:
    """The error of a 4xx; its shape is the one that OpenAI's clients read."""
    assert 400 <= response.status_code < 500
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


def stream_of(
    router: FakeRouter | ChainRouter, body: dict[str, Any], path: str
) -> list[dict[str, Any]]:
    """The events before `[DONE]`, which there must be."""
    response = post(router, {**body, "stream": True}, path)
    assert response.status_code == 200
    *events, done, end = response.content.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def leave(router: FakeRouter, body: dict[str, Any], path: str, after_events: int = 0) -> None:
    """Sends a request, and disconnects once the router works on it and `after_events` arrived."""
    content = json.dumps(body).encode()
    incoming = [{"type": "http.request", "body": content, "more_body": False}]
    events = asyncio.Queue[bytes]()
    gone = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message.get("body"):
            events.put_nowait(message["body"])

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    answering = asyncio.ensure_future(app_of(router)(scope, receive, cast(Any, send)))
    for _ in range(after_events):
        await events.get()
    while not router.open_requests:
        await asyncio.sleep(0)
    gone.set()
    await asyncio.wait_for(answering, timeout=60)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def serve(act: Callable[[str], None], waits: bool = True) -> int:
    """The exit code of `specrouter serve`, while a thread calls `act` with its address: once it is
    ready, or at once. One that leaves its threads behind does not end this process."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    def visit() -> None:
        if waits:
            wait_until(lambda: status(url) == 200)
        act(url)

    visitor = threading.Thread(target=visit, daemon=True)
    visitor.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specrouter.cli.serve.os._exit", sys.exit)
        try:
            code: Any = main(["serve", "--port", str(port)])
        except SystemExit as left:
            code = left.code
    visitor.join()
    assert isinstance(code, int)
    return code


def status(url: str) -> int | None:
    """Of `/health`; None: nobody answers."""
    try:
        return httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code
    except httpx.HTTPError:
        return None
