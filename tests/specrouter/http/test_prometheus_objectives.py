"""Objectives of a real service whose admission judges them: its answers, and what it shows."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from specrouter import ChainRouter
from specrouter.engine.slo_accounts import SLACK_BOUNDS, SloAccounts
from specrouter.http.metric_table import Distribution
from specrouter.http.prometheus import objective_values
from specrouter.request.objective import Objective
from tests.specrouter.fake_router import METRICS
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
        'specrouter_slo_predicted_slack_ratio_bucket{le="0.5"}': 0,
        "specrouter_slo_predicted_slack_ratio_count": 1,
        'specrouter_requests_total{finish_reason="unattainable"}': 1,
        'specrouter_requests_total{finish_reason="error"}': 0,
        'specrouter_requests_total{finish_reason="length"}': 2,
        'vllm:request_success_total{finished_reason="abort",model_name="target"}': 1,
    }
    assert shown(router, *expected) == expected


def test_what_admission_decided_is_seen_with_its_reason(router: ChainRouter) -> None:
    refused = post(router, asked(ttft_ms=0.001, on_unattainable="reject"), PATH)
    post(router, asked(ttft_ms=0.001), PATH)
    post(router, {**asked(), "slo": "chat"}, PATH)
    post(router, {**asked(), "slo": None}, PATH)
    found = request(router, "GET", "/router/decisions").json()["admissions"]
    told = [(each["outcome"], each["slo_class"]) for each in found]
    assert told == [
        ("rejected", "default"),
        ("declined", "default"),
        ("best_effort", "default"),
        ("admitted", "chat"),
    ]
    assert found[0]["feasible"] == refused.json()["error"]["feasible"]
    assert (
        found[0]["reason"]
        == "its objective cannot be attained beside those of admitted requests, if at all"
    )
    assert found[3]["slack"] > 0.5


def test_classes_show_up_before_their_first_request() -> None:
    values = objective_values(SloAccounts(), ["chat"])
    for name in ("declined_requests", "preemptions", "attained_requests", "missed_requests"):
        assert values[f"specrouter_slo_{name}"] == {("chat",): 0, ("default",): 0, ("none",): 0}


def accounted() -> SloAccounts:
    """Of two attained and one missed request, three declined ones of which one was rejected, and
    two admitted ones of which one was preempted."""
    accounts = SloAccounts()
    chat = Objective(50.0, None, "chat")
    for stages in ((True, True), (True, False), (False,)):
        is_attained = stages[0]
        metrics = replace(METRICS, objective=chat, attained=is_attained, attained_stages=stages)
        accounts.record(metrics, 10, 0.0, 1.0)

    def one(**state: bool) -> Any:
        usual = {"is_declined": False, "finished": False, "preemptions": 0}
        return SimpleNamespace(objective=chat, **{**usual, **state})

    late = one(is_declined=True)
    declined = [late, one(is_declined=True), one(is_declined=True, finished=True)]
    first, second = one(), one()
    accounts.note_admission([(first, 0.25), (second, 0.75), (late, None)], declined, [second])
    return accounts


def test_counts_stand_under_their_names() -> None:
    values = objective_values(accounted(), ())
    for name, value in {
        "slo_admitted_requests": 2,
        "slo_best_effort_requests": 1,
        "slo_declined_requests": 3,
        "slo_rejected_requests": 1,
        "slo_preemptions": 1,
        "slo_judged_requests": 3,
        "slo_attained_requests": 2,
        "slo_missed_requests": 1,
        "slo_tokens": 30,
        "goodput_tokens": 20,
    }.items():
        by_class = values[f"specrouter_{name}"]
        assert isinstance(by_class, dict)
        assert by_class["chat",] == value
    kept, missed = (values[f"specrouter_slo_{what}_stages"] for what in ("attained", "missed"))
    assert kept == {("chat", "0"): 2, ("chat", "1"): 1}
    assert missed == {("chat", "0"): 1, ("chat", "1"): 1}
    counts = [(bound >= 0.25) + (bound >= 0.75) for bound in (*SLACK_BOUNDS, 1.0)]
    slack = values["specrouter_slo_predicted_slack_ratio"]
    assert isinstance(slack, Distribution)
    assert (slack.bounds, list(slack.counts), slack.sum) == (SLACK_BOUNDS, counts, 1.0)
