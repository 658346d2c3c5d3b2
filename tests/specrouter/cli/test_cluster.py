"""`specrouter cluster`: what a service says of its replicas, in words and exit codes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from specrouter.cli.main import main

ANSWERS = {
    ("GET", "/health"): (200, {"status": "degraded", "replicas": {"a": "ready", "b": "lost: x"}}),
    ("POST", "/router/restart"): (200, {"status": "restarting"}),
}


class Service(HTTPServer):
    answers: dict[tuple[str, str], tuple[int, object]]
    keys: list[str | None]


class _Handler(BaseHTTPRequestHandler):
    server: Service

    def do_GET(self) -> None:
        self.server.keys.append(self.headers.get("Authorization"))
        status, body = self.server.answers[self.command, self.path]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    do_POST = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def service() -> Iterator[Service]:
    server = Service(("127.0.0.1", 0), _Handler)
    server.answers, server.keys = dict(ANSWERS), []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def url(service: Service) -> str:
    return f"http://127.0.0.1:{service.server_port}"


def test_status_names_each_replica(
    service: Service, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECROUTER_API_KEY", "secret")
    assert main(["cluster", "status", "--url", url(service)]) == 0
    assert capsys.readouterr().out == "degraded\n  a: ready\n  b: lost: x\n"
    assert service.keys == ["Bearer secret"]


def test_a_restart_is_asked_for(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "restart", "--url", url(service)]) == 0
    assert "are being restarted" in capsys.readouterr().out


def test_a_refusal_is_told_with_code_1(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    service.answers["POST", "/router/restart"] = (409, {"error": {"message": "no replicas"}})
    assert main(["cluster", "restart", "--url", url(service)]) == 1
    assert capsys.readouterr().err.endswith(": no replicas\n")


def test_a_service_that_is_down_or_none_of_ours_is_told(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    service.answers["GET", "/health"] = (503, {"error": {"message": "draining"}})
    assert main(["cluster", "status", "--url", url(service)]) == 1
    assert capsys.readouterr().out == "stopped\n"
    service.answers["GET", "/health"] = (404, ["else"])
    assert main(["cluster", "status", "--url", url(service)]) == 1
    assert "is no SpecRouter" in capsys.readouterr().err
    service.server_close()
    assert main(["cluster", "restart", "--url", "http://127.0.0.1:9"]) == 1
    assert "cannot be reached" in capsys.readouterr().err
