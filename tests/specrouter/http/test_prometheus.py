"""The page that Prometheus reads: what it counts, what it never waits for, what is said of it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from specrouter import ChainRouter, RequestOutput, SamplingParams, Speculation
from specrouter.http.prometheus import add_metrics, count_refusal
from specrouter.profile.speedup import Speedup
from specrouter.request.params import MAX_DEPTH
from tests.specrouter.http.client import Page, send

DOCS = Path(__file__).parents[3] / "docs"
PROMPTS = [[5, 17, 300, 42, 9], [7, 8, 9], [11, 3, 250, 4]]
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)
CHAIN = Speculation(chain=("small", "middle", "target"), depth=3, width=2)

Served = tuple[ChainRouter, list[RequestOutput]]


@pytest.fixture(scope="module")
def served(small_config: dict[str, Any]) -> Iterator[Served]:
    """A router, and what it has served: judged and unjudged, drafted in several ways, refused."""
    settings = copy.deepcopy(small_config)
    settings["engine"] |= {"admission": "fcfs"}
    first = {"tpot_ms": 1e6, "until_tokens": 4}
    settings["slo_classes"] = {
        name: {"stages": [first, {"tpot_ms": tpot_ms}]}
        for name, tpot_ms in (("easy", 1e6), ("hard", 1e-6))
    }
    with ChainRouter.from_config(settings) as router:
        outputs = router.generate(PROMPTS, PARAMS, CHAIN, slo="easy")
        outputs += router.generate(PROMPTS, PARAMS, slo=["hard", None, None])
        outputs += router.generate(PROMPTS[:1], PARAMS, "off")
        outputs += router.generate(PROMPTS[:1], PARAMS, timeout_s=1e-6)
        speedups = {1: Speedup(ratio=1.2, low=1.1, high=1.3)}  # takes thousands of cycles
        router.instruments.engine.policies.current.speedup.speedups = speedups
        yield router, outputs


def app_of(router: ChainRouter) -> FastAPI:
    app = FastAPI()
    add_metrics(app, router)
    return app


def get(app: FastAPI, accept: str = "*/*") -> httpx.Response:
    return send(app, "GET", "/metrics", headers=[("Accept", accept)])


@pytest.fixture(scope="module")
def page(served: Served) -> Page:
    return Page(app_of(served[0]))


# The page


def test_the_page_is_prometheus_text_or_open_metrics_on_request(served: Served) -> None:
    app = app_of(served[0])
    assert get(app).headers["content-type"].startswith("text/plain; version=")
    asked = get(app, "application/openmetrics-text; version=1.0.0")
    assert asked.headers["content-type"].startswith("application/openmetrics-text")
    assert asked.text.endswith("# EOF\n")


def test_reading_the_page_waits_for_no_cycle(served: Served) -> None:
    router = served[0]
    # In the engine's own thread, which nobody else can use meanwhile.
    assert router.instruments.run_idle(lambda: Page(app_of(router)).families)


def test_applications_count_their_own_refusals(served: Served) -> None:
    busy, idle = app_of(served[0]), app_of(served[0])
    count_refusal(busy, "overloaded")
    count_refusal(busy, "overloaded")
    count_refusal(FastAPI(), "overloaded")  # without a page
    assert Page(busy).value("specrouter_requests_refused_total", "overloaded") == 2
    assert Page(busy).value("specrouter_requests_refused_total", "bad_request") == 0
    assert Page(idle).total("specrouter_requests_refused_total") == 0


# What it counts


READ = 12 + 12 + 5  # tokens of the prompts of those that were served
PRODUCED = 7 * 12
BY_CLASS: dict[tuple[str, ...], float] = {("easy",): 3, ("hard",): 1, ("none",): 3}
# Series by the values of their labels, but for what is 0.
COUNTED: dict[str, dict[tuple[str, ...], float]] = {
    "specrouter_requests_total": {("length",): 7, ("timeout",): 1},
    "vllm:request_success_total": {("length", "target"): 7, ("abort", "target"): 1},
    "specrouter_prompt_tokens_total": {(): READ},
    "vllm:prompt_tokens_total": {("target",): READ},
    "specrouter_generated_tokens_total": {(): PRODUCED},
    "vllm:generation_tokens_total": {("target",): PRODUCED},
    "specrouter_time_to_first_token_seconds_count": BY_CLASS,
    "specrouter_time_per_output_token_seconds_count": BY_CLASS,
    "specrouter_request_seconds_count": BY_CLASS | {("none",): 4},
    "vllm:time_to_first_token_seconds_count": {("target",): 7},
    "vllm:e2e_request_latency_seconds_count": {("target",): 8},
    "specrouter_slo_judged_requests_total": {("easy",): 3, ("hard",): 1},
    "specrouter_slo_attained_requests_total": {("easy",): 3},
    "specrouter_slo_missed_requests_total": {("hard",): 1},
    "specrouter_slo_tokens_total": {("easy",): 36, ("hard",): 12, ("none",): 36},
    "specrouter_goodput_tokens_total": {("easy",): 36},
    "specrouter_slo_attained_stages_total": {
        ("easy", "0"): 3, ("easy", "1"): 3, ("hard", "0"): 1
    },
    "specrouter_slo_missed_stages_total": {("hard", "1"): 1},
    "specrouter_slo_admitted_requests_total": {("easy",): 3, ("hard",): 1},
    "specrouter_slo_best_effort_requests_total": {("none",): 3},
    **{  # first come first served
        f"specrouter_slo_{what}_total": {}
        for what in ("declined_requests", "rejected_requests", "preemptions")
    },
    # Nothing runs, waits or holds memory when all have ended.
    **{
        f"specrouter_{what}": {}
        for what in ("requests_running", "requests_waiting", "kv_reserved_tokens")
    },
    "specrouter_request_rows": {(): 8},
    "specrouter_kv_capacity_tokens": {(): 8 * (256 + 96)},
    "specrouter_model_loaded": {("small",): 1, ("middle",): 1, ("target",): 1},
}  # fmt: skip


@pytest.mark.parametrize("series", COUNTED)
def test_what_was_served_is_counted(page: Page, series: str) -> None:
    shown = page.values(series)
    assert shown
    assert {labels: value for labels, value in shown.items() if value} == COUNTED[series]


def test_times_are_of_the_requests_of_a_class(page: Page) -> None:
    for name in ("specrouter_time_to_first_token_seconds", "specrouter_request_seconds"):
        assert 0 < page.value(f"{name}_sum", "easy") < 60


def test_tokens_that_come_together_share_the_time_between(served: Served, page: Page) -> None:
    name = "specrouter_inter_token_seconds"
    # All but the first of each request, and what came with it.
    assert 7 <= page.value(f"{name}_count") <= 7 * 11
    decode_s = sum((output.metrics.tpot_ms or 0.0) * 11 / 1000 for output in served[1])
    assert page.value(f"{name}_sum") == pytest.approx(decode_s, rel=1e-3)
    for vllm in ("inter_token_latency", "time_per_output_token"):
        assert page.values(f"vllm:{vllm}_seconds_sum") == {("target",): page.value(f"{name}_sum")}
        assert page.value(f"vllm:{vllm}_seconds_count", "target") == page.value(f"{name}_count")


def test_the_mean_time_of_a_requests_tokens_is_counted_once_for_each_request(
    served: Served, page: Page
) -> None:
    name = "vllm:request_time_per_output_token_seconds"
    means = [output.metrics.tpot_ms for output in served[1] if output.metrics.tpot_ms is not None]
    assert page.value(f"{name}_count", "target") == len(means) == 7
    assert page.value(f"{name}_sum", "target") == pytest.approx(sum(means) / 1000)


def test_drafted_and_accepted_tokens_are_the_requests(served: Served, page: Page) -> None:
    metrics = [output.metrics for output in served[1]]
    assert all(m.accepted_tokens <= m.drafted_tokens for m in metrics)
    assert all(m.drafted_tokens > 0 for m in metrics[:3])
    assert metrics[6].drafted_tokens == 0  # "off"
    for ours, vllm, counted in (
        ("draft_tokens", "num_draft_tokens", sum(m.drafted_tokens for m in metrics)),
        ("accepted_tokens", "num_accepted_tokens", sum(m.accepted_tokens for m in metrics)),
    ):
        assert page.value(f"specrouter_{ours}_total") == counted
        assert page.value(f"vllm:spec_decode_{vllm}_total", "target") == counted
    # What is not accepted is the target's own, one token in each of its passes.
    assert page.value("specrouter_target_passes_total") == 7 * 12 - page.value(
        "specrouter_accepted_tokens_total"
    )


def test_accepted_tokens_by_position_fall_and_add_up(page: Page) -> None:
    at = page.values("specrouter_accepted_tokens_per_position_total")
    counts = [at[str(position),] for position in range(MAX_DEPTH)]
    assert len(at) == MAX_DEPTH
    assert counts == sorted(counts, reverse=True)
    assert sum(counts) == page.value("specrouter_accepted_tokens_total") > 0
    assert counts[0] <= page.value("specrouter_drafts_total")
    vllm = page.values("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    assert {position: count for (_, position), count in vllm.items()} == {
        position: count for (position,), count in at.items()
    }


def test_chains_share_the_targets_passes(page: Page) -> None:
    assert page.total("specrouter_chain_cycles_total") == page.value(
        "specrouter_target_passes_total"
    )
    assert page.total("specrouter_chain_tokens_total") == 7 * 12
    assert page.value("specrouter_chain_cycles_total", "small>middle>target") >= 3


def test_models_show_their_work_their_times_and_their_memory(page: Page) -> None:
    for model in ("small", "middle", "target"):
        assert page.value("specrouter_model_forwards_total", model) > 0
        assert page.value("specrouter_model_seconds_total", model) > 0
        for kind in ("weights", "kv"):
            assert page.value("specrouter_model_memory_bytes", kind, model) > 0
        predicted = [
            page.value("specrouter_model_predicted_seconds", model, n) for n in ("1", "8", "64")
        ]
        assert 0 < predicted[0] <= predicted[1] <= predicted[2] < 10
    # Every forward over a prompt reads all of it.
    read = page.value("specrouter_prompt_tokens_total")
    assert page.value("specrouter_model_tokens_total", "target") > read


def test_a_model_that_rests_is_shown(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    router = served[0]
    state = replace(
        router.instruments.engine_state(),
        quarantines={"small": 2},
        quarantined=frozenset({"small"}),
    )
    monkeypatch.setattr(router.instruments, "engine_state", lambda: state)
    shown = Page(app_of(router))
    assert shown.values("specrouter_model_quarantined") == {
        ("small",): 1,
        ("middle",): 0,
        ("target",): 0,
    }
    assert shown.value("specrouter_model_quarantines_total", "small") == 2


def test_estimates_are_shares(page: Page) -> None:
    for name in ("similarity", "predicted_acceptance", "acceptance", "calibration_error"):
        values = page.values(f"specrouter_{name}_ratio")
        assert values
        assert all(0 <= value <= 1 for value in values.values())
    assert ("small", "middle") in page.values("specrouter_similarity_ratio")
    assert ("small", "false", "middle") in page.values("specrouter_acceptance_ratio")


def test_the_time_of_cycles_is_divided_up(served: Served, page: Page) -> None:
    cycles_s = page.value("specrouter_cycle_seconds_sum")
    assert page.value("specrouter_cycle_seconds_count") == served[0].instruments.statistics().cycles
    parts = [page.total("specrouter_model_seconds_total")]
    parts += [
        page.value(f"specrouter_{part}_seconds_total") for part in ("logits", "control_plane")
    ]
    assert all(parts)
    assert sum(parts) == pytest.approx(cycles_s, rel=0.25)
    assert 0 < page.value("specrouter_control_plane_ratio") < 1


# What is said of it


def documented() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Type and labels of each metric in the tables of `docs/metrics.md`."""
    rows = re.findall(
        r"^\| `([\w:]+)` \| (\w+) \|(.*?)\|", (DOCS / "metrics.md").read_text(), re.MULTILINE
    )
    found = {name: (kind, tuple(re.findall(r"\w+", labels))) for name, kind, labels in rows}
    assert len(found) == len(rows), "a metric is described twice"
    return found


def exported(page: Page) -> dict[str, tuple[str, tuple[str, ...]]]:
    return {
        name: (family.type, tuple(sorted(set(family.samples[0].labels) - {"le"})))
        for name, family in page.families.items()
    }


def test_every_metric_is_documented_with_its_labels_and_every_documented_one_exists(
    page: Page,
) -> None:
    described = {
        name: (kind, tuple(sorted(labels))) for name, (kind, labels) in documented().items()
    }
    assert described == exported(page)


def names_in(query: str) -> set[str]:
    return set(re.findall(r"\b(?:specrouter_|vllm:)\w+", query))


def series_of(page: Page) -> set[str]:
    return {sample.name for family in page.families.values() for sample in family.samples}


def test_queries_and_alerts_of_the_document_ask_for_series_that_exist(page: Page) -> None:
    queries = (DOCS / "metrics.md").read_text().partition("## Queries")[2]
    assert len(names_in(queries)) > 10
    assert names_in(queries) <= series_of(page)


def test_the_dashboard_asks_for_series_that_exist(page: Page) -> None:
    dashboard = json.loads((DOCS.parent / "deploy" / "grafana-dashboard.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert len(panels) >= 8
    for panel in panels:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            asked = names_in(target["expr"])
            assert asked, panel["title"]
            assert asked <= series_of(page), panel["title"]
