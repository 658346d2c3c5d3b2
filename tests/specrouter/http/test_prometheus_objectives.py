"""Objectives of a real service whose admission judges them: its answers, and what it shows."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from specrouter import ChainRouter
from specrouter.engine.slo_accounts import AdmissionCounts, SloAccounts, SloCounts
from specrouter.http.prometheus import objective_sources
from tests.specrouter.http.client import Page, app_of, post, request

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
    page = Page(app_of(router))
    for series, counts in (
        ("slo_declined_requests", {"default": 2}),
        ("slo_rejected_requests", {"default": 1}),
        ("slo_best_effort_requests", {"default": 1}),
        ("slo_admitted_requests", {"chat": 1}),
        ("slo_missed_requests", {"default": 2}),
        ("slo_attained_requests", {"chat": 1}),
        ("requests", {"unattainable": 1, "length": 2}),
    ):
        shown = page.values(f"specrouter_{series}_total")
        assert {label: count for (label,), count in shown.items() if count} == counts
    assert page.value("vllm:request_success_total", "abort", "target") == 1
    told = request(router, "GET", "/router/decisions").json()["admissions"]
    outcomes = [(each["outcome"], each["slo_class"]) for each in told]
    by_value = [(outcome, "default") for outcome in ("rejected", "declined", "best_effort")]
    assert outcomes == [*by_value, ("admitted", "chat")]
    assert told[0]["feasible"] == error["feasible"]


def test_classes_show_up_before_their_first_request() -> None:
    found = objective_sources(SloAccounts(), ["chat"])
    for name, counts in (("admissions", AdmissionCounts()), ("ended", SloCounts())):
        assert found[name] == dict.fromkeys(("chat", "default", "none"), counts)
