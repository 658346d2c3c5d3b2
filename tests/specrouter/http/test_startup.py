"""While models are loaded the port answers, and then becomes the service."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import chain, repeat

import httpx
import pytest

from modelpool.errors import ConfigError
from modelpool.progress import LoadProgress
from specrouter import ChainRouter
from specrouter.engine.serving import Health
from specrouter.http.startup import Startup
from tests.specrouter.fake_router import FakeRouter
from tests.specrouter.faults import wait_until
from tests.specrouter.http.client import free_port, send, serve, status


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/health"), ("POST", "/v1/completions"), ("GET", "/nowhere")]
)
def test_every_request_is_to_be_tried_again_and_health_says_what_is_being_done(
    method: str, path: str
) -> None:
    progress = LoadProgress()
    progress.begin("loading", "small")
    progress.count(300_000_000, 1_500_000_000)
    response = send(Startup("big", progress), method, path)
    assert (response.status_code, bool(response.headers["retry-after"])) == (503, True)
    found = response.json()
    assert (found["error"]["code"], found["error"]["type"]) == ("loading", "server_error")
    if path == "/health":
        told = {"status": "loading", "target": "big", "stage": "loading", "model": "small"}
        assert told.items() <= found.items()
        assert (found["done_bytes"], found["total_bytes"]) == (300_000_000, 1_500_000_000)
        assert "loading small, 0.3 of 1.5 GB, " in found["error"]["message"]
        assert found["elapsed_s"] >= 0


def test_the_page_is_there_while_models_are_loaded() -> None:
    startup = Startup("big", LoadProgress())
    page = send(startup, "GET", "/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert send(startup, "GET", "/page/app.js").status_code == 200
    assert "not ready yet" in send(startup, "GET", "/router/live").json()["error"]["message"]
    assert send(startup, "POST", "/").status_code == 503
    assert send(Startup("big", LoadProgress(), has_page=False), "GET", "/").status_code == 503


def test_the_port_becomes_the_service_without_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    may_load, seen = threading.Event(), list[int | None]()

    def load(_: object, progress: LoadProgress, **__: object) -> FakeRouter:
        progress.begin("loading", "big")
        assert may_load.wait(60)
        return FakeRouter()

    def act(url: str) -> None:
        wait_until(lambda: status(url) is not None)
        with httpx.Client() as client:  # one connection, kept
            seen.append(client.get(f"{url}/health").status_code)
            may_load.set()
            while seen[-1] != 200:
                seen.extend([status(url), client.get(f"{url}/health").status_code])
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(ChainRouter, "from_config", load)
    assert serve(act, waits=False) == 0
    assert seen[0] == 503
    assert set(seen) == {503, 200}
    assert seen == sorted(seen, reverse=True)  # type: ignore[type-var]


def test_the_log_says_what_a_long_load_is_at(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("specrouter.http.serve._SHOW_S", 0.0)
    caplog.set_level(logging.INFO, "specrouter.http.serve")

    def load(_: object, progress: LoadProgress, **__: object) -> FakeRouter:
        progress.begin("loading", "big")
        wait_until(lambda: "not ready yet: loading big, " in caplog.text)
        return FakeRouter()

    monkeypatch.setattr(ChainRouter, "from_config", load)
    assert serve(lambda _: os.kill(os.getpid(), signal.SIGTERM)) == 0


def test_the_log_says_which_drafters_came_to_be_loaded_and_why_others_did_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "specrouter.http.serve")
    router, loading = FakeRouter(), Health("ok", loading=("a", "b", "c"))
    healths = chain([loading] * 3, repeat(Health("ok", unloadable={"b": "no such file"})))
    state = replace(router.engine_state(), weight_bytes={router.pool.target: 9, "a": 1})
    monkeypatch.setattr(ChainRouter, "from_config", lambda *_, **__: router)
    monkeypatch.setattr(router, "health", lambda: next(healths))
    monkeypatch.setattr(router, "engine_state", lambda: state)

    def act(_: str) -> None:
        wait_until(lambda: "drafters" in caplog.text)
        os.kill(os.getpid(), signal.SIGTERM)

    assert serve(act) == 0
    full = "c is not: the pool is full (it is loaded when it is first used)"
    told = f"drafters that are loaded: a; b is not: no such file; {full}"
    assert told in caplog.messages


@pytest.mark.parametrize(
    ("fault", "code", "line"),
    [
        (ConfigError("pool.models[0].source", "is gone"), 2, "pool.models[0].source: is gone"),
        (MemoryError("no room"), 3, "cannot load: MemoryError: no room"),
    ],
)
def test_a_load_that_fails_ends_the_process_with_its_cause(
    fault: Exception,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(*_: object, **__: object) -> FakeRouter:
        raise fault

    monkeypatch.setattr(ChainRouter, "from_config", load)
    assert serve(lambda _: None, waits=False) == code
    out, err = capsys.readouterr()
    assert err.splitlines()[-1] == f"specrouter: {line}"
    assert "SpecRouter serves" not in out


_HANGING = """
import sys, time
from specrouter import ChainRouter
from specrouter.cli.main import main
ChainRouter.from_config = lambda *_: time.sleep(600)
sys.exit(main(["serve", "--port", sys.argv[1]]))
"""


@pytest.mark.long
def test_a_signal_ends_a_service_that_still_loads() -> None:
    port = free_port()
    script = [sys.executable, "-c", _HANGING, str(port)]
    with subprocess.Popen(script, stdout=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: status(f"http://127.0.0.1:{port}") == 503)
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    assert out.endswith("SpecRouter has stopped\n")
