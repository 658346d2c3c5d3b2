"""What stands between the network and the service, around a small application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from modelpool.errors import ConfigError
from specrouter import OverloadedError, UnavailableError
from specrouter.config import ServerConfig
from specrouter.http.drain import Drain
from specrouter.http.guards import OPEN_PATHS, PROBE_PATHS, add_guards
from specrouter.http_client import API_KEY_VARIABLE
from tests.specrouter.fake_router import FakeRouter
from tests.specrouter.http import client
from tests.specrouter.http.client import Headers, connected, send

KEY, OTHER_KEY = "first-key", "second-key"
LIMIT = 2000


def guarded(drain: Drain | None = None, **settings: Any) -> FastAPI:
    """Echoes what it is sent, on every path, and counts its calls."""
    app = FastAPI()
    app.state.calls = 0

    @app.api_route("/{path:path}", methods=["GET", "POST", "OPTIONS"])
    async def echo(request: Request) -> PlainTextResponse:
        app.state.calls += 1
        return PlainTextResponse(await request.body())

    add_guards(app, ServerConfig(**settings), drain)
    return app


def call(
    app: FastAPI,
    method: str = "POST",
    path: str = "/generate",
    content: bytes | AsyncIterator[bytes] = b"",
    headers: Headers = (),
) -> httpx.Response:
    return send(app, method, path, content, headers, raise_app_exceptions=True)


def bearer(key: str, scheme: str = "Bearer") -> Headers:
    return [("Authorization", f"{scheme} {key}")]


def error_code(response: httpx.Response) -> str:
    """Of a refusal, in the shape that OpenAI's clients read."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    is_clients_fault = response.status_code < 500
    assert error["type"] == ("invalid_request_error" if is_clients_fault else "server_error")
    code: str = error["code"]
    return code


# Keys


@pytest.mark.parametrize("key", [KEY, OTHER_KEY])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_each_key_opens_the_service(key: str, scheme: str) -> None:
    app = guarded(api_keys=[KEY, OTHER_KEY])
    assert call(app, headers=bearer(key, scheme)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        [],
        bearer("wrong"),
        bearer(KEY[:-1]),
        bearer(KEY + "x"),
        bearer(""),
        bearer(KEY, "Basic"),
        [("Authorization", KEY)],
        [("Authorization", "Bearer \u00e9")],
    ],
)
def test_any_other_key_is_refused_before_the_application_sees_it(headers: Headers) -> None:
    app = guarded(api_keys=[KEY, OTHER_KEY])
    encoded = [(name, value.encode("latin-1")) for name, value in headers]
    response = call(app, headers=encoded)  # type: ignore[arg-type]
    assert response.status_code == 401
    assert error_code(response) == "invalid_api_key"
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert app.state.calls == 0


def test_key_of_the_environment_opens_the_service_beside_the_configured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, OTHER_KEY)
    for configured in ([], [KEY]):
        app = guarded(api_keys=configured)
        assert call(app).status_code == 401
        assert call(app, headers=bearer(OTHER_KEY)).status_code == 200
    assert call(app, headers=bearer(KEY)).status_code == 200


@pytest.mark.parametrize("value", ["", "two words"])
def test_variable_without_a_key_in_it_does_not_leave_the_door_open(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, value)
    with pytest.raises(ConfigError, match=API_KEY_VARIABLE):
        guarded()


def test_every_endpoint_of_the_service_but_the_open_ones_needs_a_key() -> None:
    app = client.service(api_keys=(KEY,))
    paths: dict[str, dict[str, Any]] = app.openapi()["paths"]
    assert paths.keys() > {"/generate", "/v1/chat/completions", "/health", "/metrics"}
    for path in paths.keys() - OPEN_PATHS:
        for method in paths[path]:
            assert call(app, method.upper(), path).status_code == 401
    for path in ("/healthy", "/health/", "/docs/"):
        assert call(app, "GET", path).status_code == 401
    for path in OPEN_PATHS:
        assert call(guarded(api_keys=[KEY]), "GET", path).status_code == 200


def test_the_schema_declares_the_key_where_one_is_needed() -> None:
    def schema(**settings: Any) -> dict[str, Any]:
        app = client.service(**settings)
        found: dict[str, Any] = call(app, "GET", "/openapi.json", headers=bearer(KEY)).json()
        return found

    locked, free = schema(api_keys=(KEY,)), schema()
    assert locked["components"]["securitySchemes"] == {
        "api_key": {"type": "http", "scheme": "bearer"}
    }
    assert locked["security"] == [{"api_key": []}]
    for path, operations in locked["paths"].items():
        for operation in operations.values():
            assert operation.get("security") == ([] if path in OPEN_PATHS else None)
    assert "securitySchemes" not in free["components"]
    assert "security" not in free


# CORS

ORIGIN = "https://page.example"
PREFLIGHT = [
    ("Origin", ORIGIN),
    ("Access-Control-Request-Method", "POST"),
    ("Access-Control-Request-Headers", "authorization,content-type"),
]


def test_without_origins_no_page_is_let_in() -> None:
    response = call(guarded(), headers=[("Origin", ORIGIN)])
    assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize("origins", [[ORIGIN], ["*"]])
def test_preflight_of_a_named_origin_needs_no_key(origins: list[str]) -> None:
    response = call(guarded(api_keys=[KEY], cors_origins=origins), "OPTIONS", headers=PREFLIGHT)
    assert response.status_code == 200
    assert response.headers["Access-Control-Allow-Origin"] in (ORIGIN, "*")
    assert "authorization" in response.headers["Access-Control-Allow-Headers"]


def test_preflight_of_another_origin_is_refused() -> None:
    app = guarded(cors_origins=["https://other.example"])
    response = call(app, "OPTIONS", headers=PREFLIGHT)
    assert response.status_code == 400
    assert "Access-Control-Allow-Origin" not in response.headers


def test_refusals_too_can_be_read_by_a_page() -> None:
    app = guarded(api_keys=[KEY], cors_origins=[ORIGIN])
    response = call(app, headers=[("Origin", ORIGIN)])
    assert response.status_code == 401
    assert response.headers["Access-Control-Allow-Origin"] == ORIGIN
    exposed = response.headers["Access-Control-Expose-Headers"]
    assert {"x-request-id", "retry-after", "x-should-retry"} <= set(exposed.split(", "))


# Concurrency


def test_requests_beyond_the_limit_are_refused_but_probes_pass() -> None:
    app = guarded(limit_concurrency=1)

    async def test() -> None:
        async with connected(app) as caller:
            end = asyncio.Event()
            first = asyncio.ensure_future(caller.post("/generate", content=half_sent(end)))
            await asyncio.sleep(0)
            refused = await caller.get("/v1/models")
            assert (refused.status_code, error_code(refused)) == (503, "overloaded")
            assert int(refused.headers["Retry-After"]) >= 1
            for path in PROBE_PATHS:
                assert (await caller.get(path)).status_code == 200
            end.set()
            assert (await first).status_code == 200
            assert (await caller.get("/v1/models")).status_code == 200

    asyncio.run(test())


# Drain


async def half_sent(end: asyncio.Event | None = None) -> AsyncIterator[bytes]:
    yield b"x"
    await (end or asyncio.Event()).wait()


def test_who_has_sent_half_a_request_is_told_that_the_service_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specrouter.http.drain._LAST_ARRIVAL_S", 0.01)
    drain = Drain()
    app = guarded(drain)
    seen: list[int] = []

    async def body() -> AsyncIterator[bytes]:
        yield b"x"
        seen.append(drain.in_flight)
        drain.begin()
        async for chunk in half_sent():
            yield chunk

    response = call(app, content=body())
    assert (response.status_code, error_code(response)) == (503, "shutting_down")
    assert (seen, drain.in_flight, app.state.calls) == ([0], 0, 0)
    assert call(app, content=half_sent()).status_code == 503  # one that comes later, too


def test_new_generation_is_refused_while_the_service_drains() -> None:
    drain = Drain()
    app = guarded(drain)
    assert call(app).status_code == 200
    drain.begin()
    response = call(app)
    assert (response.status_code, error_code(response)) == (503, "shutting_down")
    assert int(response.headers["Retry-After"]) >= 1
    assert app.state.calls == 1
    assert call(app, "GET", "/router/slo").status_code == 200


def test_a_body_is_read_before_its_request_is_refused() -> None:
    """The connection closes with the refusal; what is unread then would take the answer with it."""
    drain = Drain()
    app = guarded(drain)
    drain.begin()
    sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(3):
            sent += 1
            yield b"x" * LIMIT

    assert call(app, content=body()).status_code == 503
    assert sent == 3


def test_request_is_in_flight_until_its_answer_has_ended() -> None:
    drain = Drain()
    app = FastAPI()

    @app.post("/generate")
    async def generate() -> int:
        return drain.in_flight

    add_guards(app, ServerConfig(), drain)
    assert call(app).json() == 1
    assert drain.in_flight == 0
    assert call(app, path="/none").status_code == 404
    assert drain.in_flight == 0


# What is counted


class _Nothing(Collector):
    """What a router without an engine has to tell."""

    def collect(self) -> list[Metric]:
        return []


@pytest.fixture(autouse=True)
def no_engine_behind_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specrouter.http.prometheus.RouterCollector", lambda *_: _Nothing())


def service(refuses: Exception | None = None, drain: Drain | None = None) -> FastAPI:
    """All layers around the whole application."""
    router = FakeRouter(refuses=refuses)
    return client.service(router, drain, api_keys=(KEY,), max_body_bytes=LIMIT)


def refused(app: FastAPI) -> dict[str, float]:
    """By reason; those that were never given left out."""
    return {reason: count for reason, count in app.state.refusals.items() if count}


@pytest.mark.parametrize(
    "accepted",
    [
        'text/plain; version="0.0.4"',
        "text/plain; version=x",
        "application/openmetrics-text; version=x",
        'application/openmetrics-text; version="1.0.0", text/plain;version=0.0.4;q=0.5',
        "application/openmetrics-text; version=1.0.0x",
        "application/openmetrics-text; version=99.0.0.\u00e9; escaping=x",
        "text/plain; version=",
        "\u00e9",
    ],
)
def test_a_scraper_that_spells_a_version_in_its_own_way_gets_a_page(accepted: str) -> None:
    headers = [("Accept", accepted.encode("latin-1"))]
    response = call(service(), "GET", "/metrics", headers=headers)  # type: ignore[arg-type]
    assert response.status_code == 200


JSON = [*bearer(KEY), ("Content-Type", "application/json")]
GOOD = b'{"prompt": "x", "max_new_tokens": 4}'


LARGE = b"x" * (LIMIT + 1)
UNKNOWN = b'{"prompt": "x", "model": "y"}'


@pytest.mark.parametrize(
    ("path", "content", "status", "counted"),
    [
        pytest.param("/generate", GOOD, 200, {}, id="answered"),
        pytest.param("/generate", LARGE, 413, {"bad_request": 1}, id="too large"),
        pytest.param("/generate", b"{", 400, {"bad_request": 1}, id="no JSON"),
        pytest.param("/generate", b'{"prompt": "\xff"}', 400, {"bad_request": 1}, id="no UTF-8"),
        pytest.param("/generate", b'{"prompt": 5}', 400, {"bad_request": 1}, id="bad field"),
        pytest.param("/v1/completions", UNKNOWN, 404, {"bad_request": 1}, id="no such model"),
        pytest.param("/none", b"", 404, {"bad_request": 1}, id="no such path"),
        pytest.param("/health", b"", 405, {"bad_request": 1}, id="no such method"),
    ],
)
def test_a_mistake_of_the_client_is_counted_as_a_bad_request(
    path: str, content: bytes, status: int, counted: dict[str, float]
) -> None:
    app = service()
    assert call(app, path=path, content=content, headers=JSON).status_code == status
    assert refused(app) == counted


def test_a_request_without_a_key_is_counted_as_unauthorized() -> None:
    app = service()
    assert call(app, content=GOOD).status_code == 401
    assert call(app, "GET", "/router/slo").status_code == 401
    assert refused(app) == {"unauthorized": 2}


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        (OverloadedError(1, 1.0), "overloaded"),
        (UnavailableError("stopped"), "unavailable"),
        (None, "unavailable"),  # the service drains
    ],
)
def test_a_refusal_of_the_service_is_counted_by_its_reason(
    refusal: Exception | None, reason: str
) -> None:
    drain = Drain()
    app = service(refuses=refusal, drain=drain)
    if refusal is None:
        drain.begin()
    assert call(app, content=GOOD, headers=JSON).status_code == 503
    assert refused(app) == {reason: 1}
