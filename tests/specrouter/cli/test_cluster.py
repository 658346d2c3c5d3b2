"""`specrouter cluster`: what a service says of its replicas, in words and exit codes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest

from specrouter.cli.main import main
from tests.json_server import JsonHandler, serving

HEALTH = {"status": "degraded", "replicas": {"a": "ready", "b": "lost: x"}}
DRAINING = {"error": {"message": "draining"}}


class Service(JsonHandler):
    """Gives everybody the same answer."""

    given: ClassVar[tuple[object, int]]
    seen: ClassVar[list[tuple[str, str, str | None]]]

    def do_GET(self) -> None:
        self.seen.append((self.command, self.path, self.headers.get("Authorization")))
        self.answer(*self.given)

    do_POST = do_GET


@pytest.fixture
def url() -> Iterator[str]:
    Service.given, Service.seen = (HEALTH, 200), []
    with serving(Service) as url:
        yield url


def test_status_names_each_replica(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECROUTER_API_KEY", "secret")
    assert main(["cluster", "status", "--url", url]) == 0
    assert capsys.readouterr().out == "degraded\n  a: ready\n  b: lost: x\n"
    assert Service.seen == [("GET", "/health", "Bearer secret")]


def test_a_restart_is_asked_for(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "restart", "--url", url]) == 0
    assert "are being restarted" in capsys.readouterr().out
    assert [one[:2] for one in Service.seen] == [("POST", "/router/restart")]


@pytest.mark.parametrize(
    ("command", "given", "said"),
    [
        ("restart", ({"error": {"message": "no replicas"}}, 409), ": no replicas\n"),
        ("status", (DRAINING, 503), "stopped: draining\n"),
        ("status", (["else"], 404), "is no SpecRouter"),
        ("status", ({"error": "Not Found"}, 404), "is no SpecRouter"),
    ],
)
def test_a_refusal_or_a_service_that_is_down_or_none_of_ours_is_told_with_code_1(
    command: str, given: tuple[object, int], said: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Service.given = given
    assert main(["cluster", command, "--url", url]) == 1
    assert said in "".join(capsys.readouterr())


@pytest.mark.parametrize("command", ["status", "restart"])
@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://localhost:80a0", "localhost:8000"])
def test_nobody_at_the_address_is_told(
    command: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", command, "--url", url]) == 1
    assert "cannot be reached: " in "".join(capsys.readouterr())


def test_who_does_not_speak_http_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as other:
        answering = other.submit(lambda: listener.accept()[0].sendall(b"SSH-2.0\r\n"))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert main(["cluster", "status", "--url", url]) == 1
        answering.result()
    assert "stopped: cannot be reached: SSH-2.0" in capsys.readouterr().out
