"""Replicas are restarted by a request that does not wait for them, once at a time."""

from __future__ import annotations

import threading
import time

import pytest

from specrouter.engine.serving import Health
from tests.specrouter.fake_router import FakeRouter
from tests.specrouter.http.client import request


class Replicas(FakeRouter):
    """Restarts end when `go_on` is set."""

    replicas = {"r-0": "ready", "r-1": "lost: killed"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def health(self) -> Health:
        return Health("degraded", self.replicas)

    def restart_replicas(self) -> None:
        self.restarted += 1
        self.go_on.wait(60.0)


def test_health_is_degraded_and_not_down_while_some_replicas_serve() -> None:
    answer = request(Replicas(), "GET", "/health")
    assert answer.status_code == 200
    assert answer.json() == {"status": "degraded", "replicas": dict(Replicas.replicas)}


def test_without_replicas_there_is_nothing_to_restart() -> None:
    router = FakeRouter()
    answer = request(router, "POST", "/router/restart")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "no_replicas")
    assert not router.restarted
    assert request(router, "GET", "/health").json() == {"status": "ok"}


def test_a_restart_is_not_waited_for() -> None:
    router = Replicas()
    router.go_on.set()
    answer = request(router, "POST", "/router/restart")
    assert (answer.status_code, answer.json()) == (200, {"status": "restarting"})
    deadline = time.monotonic() + 60.0
    while not router.restarted:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_only_a_post_restarts(method: str) -> None:
    router = Replicas()
    assert request(router, method, "/router/restart").status_code == 405
    assert not router.restarted
