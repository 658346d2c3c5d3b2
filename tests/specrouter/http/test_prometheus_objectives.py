"""Objectives of a real service whose admission judges them: its answers, and what it shows."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from specrouter import ChainRouter
from specrouter.engine.slo_accounts import AdmissionCounts, SloAccounts, SloCounts
from specrouter.http.prometheus import objective_sources
from specrouter.request.objective import Objective
from tests.specrouter.http.client import post, request

PATH = "/v1/completions"


@pytest.fixture
def router(small_config: dict[str, Any]) -> Iterator[ChainRouter]:
    settings = copy.deepcopy(small_config)
    settings["engine"]["admission"] = "slo"
    settings["slo_classes"] = {"chat": {"ttft_ms": 60_000, "on_unattainable": "reject"}}
    with ChainRouter.from_config(settings) as router:
        yield router


def asked(**slo: Any) -> dict[str, Any]:
    return {"prompt": [5, 17, 300], "max_tokens": 6, "ignore_eos": True, "slo": slo}


def shown(router: ChainRouter, *series: str) -> dict[str, float]:
    """The values of series of the page that Prometheus reads."""
    lines = request(router, "GET", "/metrics").text.splitlines()
    return {
        name: float(line.rpartition(" ")[2])
        for name in series
        for line in lines
        if line.startswith(f"{name} ")
    }


def of_class(name: str, what: str) -> str:
    return f'specrouter_slo_{what}_total{{slo_class="{name}"}}'


def test_who_is_rejected_and_who_is_served_all_the_same_is_seen(router: ChainRouter) -> None:
    response = post(router, asked(ttft_ms=0.001, on_unattainable="reject"), PATH)
    assert response.status_code == 503
    error = response.json()["error"]
    assert error["code"] == "slo_unattainable"
    assert error["feasible"]["tpot_ms"] is None
    assert 0.001 < error["feasible"]["ttft_ms"] < 60_000
    response = post(router, asked(ttft_ms=0.001, on_unattainable="best_effort"), PATH)
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] == 6
    assert post(router, {**asked(), "slo": "chat"}, PATH).status_code == 200
    expected = {
        of_class("default", "declined_requests"): 2,
        of_class("default", "rejected_requests"): 1,
        of_class("default", "best_effort_requests"): 1,
        of_class("default", "admitted_requests"): 0,
        of_class("default", "missed_requests"): 2,
        of_class("chat", "admitted_requests"): 1,
        of_class("chat", "attained_requests"): 1,
        of_class("chat", "declined_requests"): 0,
        'specrouter_requests_total{finish_reason="unattainable"}': 1,
        'specrouter_requests_total{finish_reason="error"}': 0,
        'specrouter_requests_total{finish_reason="length"}': 2,
        'vllm:request_success_total{finished_reason="abort",model_name="target"}': 1,
    }
    assert shown(router, *expected) == expected
    told = request(router, "GET", "/router/decisions").json()["admissions"]
    outcomes = [(each["outcome"], each["slo_class"]) for each in told]
    by_value = [(outcome, "default") for outcome in ("rejected", "declined", "best_effort")]
    assert outcomes == [*by_value, ("admitted", "chat")]
    assert told[0]["feasible"] == error["feasible"]


def test_classes_show_up_before_their_first_request() -> None:
    found = objective_sources(SloAccounts(), ["chat"])
    for name, counts in (("admissions", AdmissionCounts()), ("ended", SloCounts())):
        assert found[name] == dict.fromkeys(("chat", "default", "none"), counts)


def test_preemptions_are_counted_by_class() -> None:
    state = {"is_declined": False, "finished": False, "preemptions": 0}
    one: Any = SimpleNamespace(
        objective=Objective(tpot_ms=50.0, ttft_ms=None, slo_class="chat"), **state
    )
    accounts = SloAccounts()
    accounts.note_admission([one], [], [one])
    found = objective_sources(accounts, ())["admissions"]
    assert {name: counts.preempted for name, counts in found.items()} == {
        "chat": 1,
        "default": 0,
        "none": 0,
    }
