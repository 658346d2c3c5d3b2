"""What the router decided and did, and whether it is well."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest

from specrouter.engine.serving import Health
from specrouter.http.drain import Drain
from tests.specrouter.fake_router import (
    ADMISSION,
    DECISION,
    PREFIX,
    SLO_REPORT,
    STATISTICS,
    FakeRouter,
)
from tests.specrouter.http.client import request


def test_health_and_its_end() -> None:
    router = FakeRouter()
    response = request(router, "GET", "/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    router.is_healthy = False
    assert request(router, "GET", "/health").status_code == 503


def test_a_service_that_drains_is_not_well() -> None:
    drain = Drain()
    assert request(FakeRouter(), "GET", "/health", drain=drain).status_code == 200
    drain.begin()
    response = request(FakeRouter(), "GET", "/health", drain=drain)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")


def test_the_routers_decisions_are_shown_with_their_alternatives() -> None:
    response = request(FakeRouter(), "GET", "/router/decisions")
    assert response.status_code == 200
    [decision] = response.json()["decisions"]
    assert decision == DECISION.to_json()
    assert decision["chain"] == ["small", "big"]
    assert decision["reason"] == "first decision"
    assert [option["chain"] for option in decision["alternatives"]] == [["big"]]


def test_what_requests_found_cached_is_shown() -> None:
    [prefix] = request(FakeRouter(), "GET", "/router/decisions").json()["prefixes"]
    assert prefix == PREFIX.to_json()
    assert (prefix["cached_tokens"], prefix["hit_rate"]) == (30, 0.75)


def test_decisions_of_admission_are_shown_with_their_reasons() -> None:
    [admission] = request(FakeRouter(), "GET", "/router/decisions").json()["admissions"]
    assert admission == ADMISSION.to_json()
    assert (admission["request"], admission["outcome"]) == (3, "rejected")
    assert admission["feasible"] == {"ttft_ms": 900.0, "tpot_ms": None}


def test_statistics_are_the_routers_totals() -> None:
    response = request(FakeRouter(), "GET", "/router/statistics")
    assert response.status_code == 200
    assert response.json() == dataclasses.asdict(STATISTICS)
    assert response.json()["forwards"] == {"big": 4}


def test_how_true_probabilities_are_is_shown_by_chain() -> None:
    response = request(FakeRouter(), "GET", "/router/calibration")
    assert response.json() == {
        "calibration": [
            {
                "proposers": ["small"],
                "verifier": "big",
                "sampled": True,
                "nodes": 100.0,
                "expected_error": 0.02,
                "brier": 0.1,
                "base_brier": 0.2,
            }
        ]
    }


def test_the_report_of_objectives_is_the_routers() -> None:
    response = request(FakeRouter(), "GET", "/router/slo")
    assert response.status_code == 200
    assert response.json() == dataclasses.asdict(SLO_REPORT)
    assert response.json()["classes"]["interactive"]["attainment"] == 0.5


# Replicas: restarted by a request that does not wait for them, one restart at a time


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
