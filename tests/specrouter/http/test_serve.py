"""The service as a process: how it starts, drains, stops and fails."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from specrouter import ChainRouter
from specrouter.cli.main import main
from specrouter.config import ServerConfig
from specrouter.http.drain import Drain
from specrouter.http.serve import check_server
from specrouter.http_client import API_KEY_VARIABLE
from tests.specrouter.fake_router import FakeRouter
from tests.specrouter.faults import PATIENCE_S, wait_until
from tests.specrouter.http.client import serve, status

POOL = {"target": "tiny-1m", "models": [{"name": "tiny-1m", "source": "bundled:tiny-1m"}]}
PROMPT = {"prompt": "def f", "ignore_eos": True, "stream": True}


# After each cycle it waits for so many seconds, as long as there is a file of this name.
_PACED = """
import runpy, sys, time
from pathlib import Path
from specrouter.engine.engine import Engine

gate, pause_s, step = Path(sys.argv[1]), float(sys.argv[2]), Engine.step

def paced(engine):
    step(engine)
    until_s = time.monotonic() + pause_s
    while gate.exists() and time.monotonic() < until_s:
        time.sleep(0.01)

Engine.step = paced
sys.argv[1:] = sys.argv[3:]
runpy.run_module("specrouter", run_name="__main__")
"""


@contextmanager
def running(
    gate: Path, pause_s: float, **server: Any
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`python -m specrouter serve` on bundled models, and its address. See `_PACED`."""
    gate.touch()
    config = gate.with_suffix(".yaml")
    settings = {"pool": POOL, "engine": {"max_requests": 2}, "server": {"port": 0, **server}}
    config.write_text(json.dumps(settings))  # JSON is YAML
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # workers that spin wait for busy cores
    process = subprocess.Popen(
        [sys.executable, "-c", _PACED, gate, str(pause_s), "serve", "--config", config],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=one_thread,
    )
    try:
        assert process.stdout is not None
        announcement = process.stdout.readline()
        assert announcement.startswith("SpecRouter serves tiny-1m at http://"), process.communicate(
            timeout=10
        )
        yield process, announcement.split()[4]
    finally:
        process.kill()
        process.communicate()


def last_event(lines: Iterator[str]) -> Any:
    """Of what is left of a stream, before `[DONE]`."""
    *_, last, done = [line.removeprefix("data: ") for line in lines if line]
    assert done == "[DONE]"
    return json.loads(last)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, list[Any]]:
    """Exit code, stdout and the log of a service whose log is JSON."""
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, [json.loads(line) for line in err.splitlines()]


def test_sigterm_lets_a_stream_finish_and_takes_no_new_request(tmp_path: Path) -> None:
    body, headers = {**PROMPT, "max_new_tokens": 200}, {"x-request-id": "long"}
    gate = tmp_path / "gate"
    with running(gate, PATIENCE_S, drain_s=300.0, log_format="json") as (process, url):
        with httpx.stream(
            "POST", f"{url}/generate", json=body, headers=headers, timeout=PATIENCE_S
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: status(url) == 503)
            health = httpx.get(f"{url}/health", timeout=PATIENCE_S).json()
            assert health["status"] == "draining"
            refused = httpx.post(f"{url}/generate", json={"prompt": "p"}, timeout=PATIENCE_S)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert "Retry-After" in refused.headers
            gate.unlink()
            last = last_event(lines)
        assert (last["finish_reason"], last["metrics"]["output_tokens"]) == ("length", 200)
        code, out, log = ended(process)
    assert code == 0
    assert out.endswith("SpecRouter has stopped\n")
    (line,) = [line for line in log if line.get("request_id") == "long" and "status" in line]
    assert (line["status"], line["client_left"], line["path"]) == (200, False, "/generate")


@pytest.mark.long
def test_requests_that_outlast_the_drain_get_a_last_message(tmp_path: Path) -> None:
    body = {**PROMPT, "max_new_tokens": 1000, "speculation": "off"}
    with running(tmp_path / "gate", 0.05, drain_s=0.2, log_format="json") as (process, url):
        with httpx.stream("POST", f"{url}/generate", json=body, timeout=PATIENCE_S) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            last = last_event(lines)
        assert last["error"]["code"] == "shutting_down"
        code, _, log = ended(process)
    assert code == 0
    assert any("did not finish" in line["message"] for line in log)


# In this process, on a router without models


class Router(FakeRouter):
    """Its requests never end, not even when it is closed or has failed."""

    def __init__(self) -> None:
        super().__init__(hold_after=1)
        self.failure: str | None = None
        self.closings = 0

    def close(self, patience_s: float = 30.0) -> None:
        self.closings += 1

    def fail(self) -> None:
        self.failure = "the disk is full"
        self.is_healthy = False


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Router:
    fake = Router()
    monkeypatch.setattr(ChainRouter, "from_config", lambda *_, **__: fake)
    monkeypatch.setattr("specrouter.http.serve._LAST_MESSAGES_S", 0.2)
    return fake


def begin_request(url: str, router: Router, stream: bool = True) -> socket.socket:
    """Leaves one running, until the connection is closed."""
    host, _, port = url.removeprefix("http://").partition(":")
    client = socket.create_connection((host, int(port)))
    body = json.dumps({"prompt": "p", "stream": stream}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
    client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    wait_until(lambda: router.open_requests == 1)
    return client


def test_second_signal_waits_for_no_request(router: Router) -> None:
    signalled, running = list[float](), list[socket.socket]()

    def act(url: str) -> None:
        running.append(begin_request(url, router))
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: status(url) == 503)
        assert router.closings == 0  # it may go on for 30 s
        os.kill(os.getpid(), signal.SIGTERM)
        signalled.append(time.monotonic())

    assert serve(act) == 0
    assert time.monotonic() - signalled[0] < 25.0
    assert router.closings == 1
    assert router.is_closed
    running[0].close()


def test_half_a_request_holds_nothing_up(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drain would wait for 30 s."""
    signalled: list[float] = []
    said: list[bytes] = []
    is_read, real = threading.Event(), Drain.arrival

    @asynccontextmanager
    async def arrival(drain: Drain, timeout_s: float) -> AsyncIterator[None]:
        async with real(drain, timeout_s):
            is_read.set()
            yield

    monkeypatch.setattr(Drain, "arrival", arrival)

    def act(url: str) -> None:
        is_read.clear()  # which the probes may have set
        host, _, port = url.removeprefix("http://").partition(":")
        head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
        with socket.create_connection((host, int(port))) as client:
            client.sendall(head)
            assert is_read.wait(PATIENCE_S)
            os.kill(os.getpid(), signal.SIGTERM)
            signalled.append(time.monotonic())
            said.extend(iter(lambda: client.recv(4096), b""))

    assert serve(act) == 0
    assert time.monotonic() - signalled[0] < 25.0
    assert b"".join(said).startswith(b"HTTP/1.1 503")


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_hangs_up_frees_its_row(stream: bool, router: Router) -> None:
    def act(url: str) -> None:
        begin_request(url, router, stream).close()
        wait_until(lambda: router.open_requests == 0)
        os.kill(os.getpid(), signal.SIGTERM)

    assert serve(act) == 0
    assert len(router.calls) == 1


@pytest.mark.parametrize("key", ["a-secret", None])
def test_the_curl_that_is_announced_has_the_key_s_header_but_not_the_key(
    key: str | None,
    router: Router,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if key is not None:
        monkeypatch.setenv(API_KEY_VARIABLE, key)
    assert serve(lambda _: os.kill(os.getpid(), signal.SIGTERM)) == 0
    out, err = capsys.readouterr()
    curl = shlex.split(out.partition("or try:\n")[2].partition("\nSpecRouter")[0])
    header = f"Authorization: Bearer ${API_KEY_VARIABLE}"
    assert (header in curl) == (key is not None)
    assert json.loads(curl[-1])["prompt"]
    assert "a-secret" not in out + err


@pytest.mark.parametrize("drains", [False, True])
def test_engine_that_has_failed_stops_the_service_with_code_3_and_the_cause(
    drains: bool, router: Router, capsys: pytest.CaptureFixture[str]
) -> None:
    def act(url: str) -> None:
        with begin_request(url, router):
            if drains:
                os.kill(os.getpid(), signal.SIGTERM)
                wait_until(lambda: status(url) == 503)
            router.fail()
            wait_until(lambda: status(url) is None)

    assert serve(act) == 3
    out, err = capsys.readouterr()
    assert err.splitlines()[-1] == "specrouter: the engine has failed: the disk is full"
    assert "has stopped" not in out


# What is refused before a model is loaded


def test_template_may_lie_in_the_users_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    config = ServerConfig.model_validate({"chat_template": "~/chat.jinja"})
    assert config.chat_template == tmp_path / "chat.jinja"
    check_server(config)


def test_serve_refuses_a_bad_setting_with_code_2_and_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "two words")
    assert main(["serve"]) == 2
    assert capsys.readouterr().err.startswith(f"specrouter: {API_KEY_VARIABLE}: ")
    monkeypatch.delenv(API_KEY_VARIABLE)
    config = tmp_path / "scenario.yaml"
    server = {"chat_template": str(tmp_path / "none.jinja")}
    config.write_text(json.dumps({"pool": POOL, "server": server}))
    assert main(["serve", "--config", str(config)]) == 2
    assert "server.chat_template: " in capsys.readouterr().err
