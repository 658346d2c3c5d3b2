"""What the router decided and did, and whether it is well."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import Any

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
from tests.specrouter.faults import PATIENCE_S, wait_until
from tests.specrouter.http.client import app_of, connected, request


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


def page(name: str) -> Any:
    return request(FakeRouter(), "GET", f"/router/{name}").json()


def test_decisions_are_shown_with_their_reasons() -> None:
    shown = page("decisions")
    recorded: dict[str, Any] = {"decisions": DECISION, "prefixes": PREFIX, "admissions": ADMISSION}
    expected = {name: [one.to_json()] for name, one in recorded.items()}
    assert shown == expected | {"routings": [], "speedups": {}}
    [decision], [prefix], [admission] = (shown[name] for name in recorded)
    assert (decision["chain"], decision["reason"]) == (["small", "big"], "first decision")
    assert [option["chain"] for option in decision["alternatives"]] == [["big"]]
    assert (prefix["cached_tokens"], prefix["hit_rate"]) == (30, 0.75)
    assert (admission["request"], admission["outcome"]) == (3, "rejected")
    assert admission["feasible"] == {"ttft_ms": 900.0, "tpot_ms": None}


def test_statistics_and_objectives_are_the_routers() -> None:
    statistics, slo = page("statistics"), page("slo")
    assert (statistics, slo) == (dataclasses.asdict(STATISTICS), dataclasses.asdict(SLO_REPORT))
    assert statistics["forwards"] == {"big": 4}
    assert slo["classes"]["interactive"]["attainment"] == 0.5


def test_how_true_probabilities_are_is_shown_by_chain() -> None:
    tree = {"proposers": ["small"], "verifier": "big", "sampled": True}
    figures = {"nodes": 100.0, "expected_error": 0.02, "brier": 0.1, "base_brier": 0.2}
    assert page("calibration") == {"calibration": [{**tree, **figures}]}


def test_health_and_models_say_which_drafters_are_still_loaded_and_which_cannot_be() -> None:
    router = FakeRouter()
    health = Health("ok", loading=("small",), unloadable={"middle": "no such file"})
    router.health = lambda: health  # type: ignore[method-assign]
    answer = request(router, "GET", "/health")
    assert answer.status_code == 200
    told = {"status": "ok", "loading": ["small"], "unloadable": {"middle": "no such file"}}
    assert answer.json() == told
    [model] = request(router, "GET", "/v1/models").json()["data"]
    assert model["loading"] == ["small"]


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
        assert self.go_on.wait(PATIENCE_S)
        self.restarted += 1


def test_some_replicas_serve_and_a_restart_is_not_waited_for_not_even_as_the_service_ends() -> None:
    router = Replicas()
    answer = request(router, "GET", "/health")
    assert answer.status_code == 200
    assert answer.json() == {"status": "degraded", "replicas": dict(Replicas.replicas)}

    async def restart() -> None:
        async with connected(app_of(router)) as client:
            answer = await client.post("/router/restart")
            second = await client.post("/router/restart")
        assert (answer.status_code, answer.json()) == (200, {"status": "restarting"})
        assert (second.status_code, second.json()["error"]["code"]) == (409, "restarting")

    try:
        asyncio.run(restart())
        assert not router.restarted
    finally:
        router.go_on.set()
    wait_until(lambda: router.restarted > 0)


def test_while_no_replica_is_ready_each_says_why() -> None:
    router = Replicas()
    router.health = lambda: Health("stopped", router.replicas)  # type: ignore[method-assign]
    answer = request(router, "GET", "/health")
    assert answer.status_code == 503
    assert answer.json()["replicas"] == dict(Replicas.replicas)
    assert answer.json()["error"]["code"] == "no_replica_ready"
    router.is_healthy = False
    assert request(router, "GET", "/health").json()["error"]["code"] == "engine_stopped"


def test_without_replicas_there_is_nothing_to_restart() -> None:
    router = FakeRouter()
    answer = request(router, "POST", "/router/restart")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "no_replicas")
    assert not router.restarted
    assert request(router, "GET", "/health").json() == {"status": "ok"}
