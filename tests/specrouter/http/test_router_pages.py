"""What the router decided and did, and whether it is well."""

from __future__ import annotations

import dataclasses

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
