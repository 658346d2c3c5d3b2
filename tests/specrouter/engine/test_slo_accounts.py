"""What has ended is counted once, in its class and in the total."""

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from specrouter.engine.slo_accounts import (
    AdmissionCounts,
    SloAccounts,
    SloCounts,
    SloFigures,
)
from specrouter.request.objective import Objective
from specrouter.request.output import RequestMetrics
from tests.specrouter.fake_router import METRICS

CHAT = Objective(tpot_ms=50.0, ttft_ms=None, slo_class="chat")
BY_VALUE = Objective(tpot_ms=50.0, ttft_ms=None)


def metrics(
    objective: Objective | None, attained: bool | None, tpot_ms: float | None = 10.0
) -> RequestMetrics:
    return replace(METRICS, objective=objective, attained=attained, tpot_ms=tpot_ms)


def recorded(*ended: tuple[Objective | None, bool | None, int]) -> SloAccounts:
    """Of requests: what was asked, whether it was attained, and how many tokens there were."""
    accounts = SloAccounts()
    for objective, attained, tokens in ended:
        accounts.record(metrics(objective, attained), tokens, 0.0, 1.0)
    return accounts


def test_nothing_has_ended_at_first() -> None:
    report = SloAccounts().report()
    assert (report.duration_s, report.classes) == (0.0, {})
    assert report.total == SloFigures(
        requests=0,
        judged=0,
        attained=0,
        attainment=None,
        tokens=0,
        tokens_per_s=0.0,
        goodput_tokens_per_s=0.0,
        ttft_ms=None,
        tpot_ms=None,
        e2e_ms=None,
    )


def test_requests_are_counted_in_their_class_and_in_total() -> None:
    chat = [(CHAT, attained, 8) for attained in (True, True, False)]
    report = recorded(*chat, (BY_VALUE, False, 8), (None, None, 8)).report()
    assert {
        name: (one.requests, one.judged, one.attained) for name, one in report.classes.items()
    } == {"chat": (3, 3, 2), "default": (1, 1, 0), "none": (1, 0, 0)}
    assert (report.total.requests, report.total.judged, report.total.attained) == (5, 4, 2)
    assert report.classes["chat"].attainment == pytest.approx(2 / 3)
    assert report.classes["none"].attainment is None
    assert report.total.attainment == 0.5


def test_counts_are_those_of_the_report() -> None:
    assert recorded((CHAT, True, 8), (CHAT, False, 5), (None, None, 3)).counts() == {
        "chat": SloCounts(requests=2, judged=2, attained=1, tokens=13, attained_tokens=8),
        "none": SloCounts(requests=1, tokens=3),
    }


def test_goodput_is_of_attained_tokens_from_the_first_submission_to_the_latest_end() -> None:
    accounts = SloAccounts()
    accounts.record(metrics(CHAT, True), 30, submitted_s=102.0, ended_s=104.0)
    accounts.record(metrics(BY_VALUE, True), 10, submitted_s=100.0, ended_s=103.0)
    accounts.record(metrics(BY_VALUE, False), 20, submitted_s=101.0, ended_s=110.0)
    accounts.record(metrics(None, None), 40, submitted_s=103.0, ended_s=105.0)
    report = accounts.report()
    assert report.duration_s == 10.0
    assert report.total.tokens_per_s == pytest.approx(10.0)
    goodputs = {name: one.goodput_tokens_per_s for name, one in report.classes.items()}
    assert goodputs == pytest.approx({"chat": 3.0, "default": 1.0, "none": 0.0})
    assert report.total.goodput_tokens_per_s == pytest.approx(sum(goodputs.values()))


def test_end_to_end_latencies_are_reported_by_class() -> None:
    accounts = SloAccounts()
    for e2e_ms in (100.0, 200.0, 300.0):
        accounts.record(replace(metrics(CHAT, True), e2e_ms=e2e_ms), 8, 0.0, 1.0)
    accounts.record(replace(metrics(None, None), e2e_ms=None), 8, 0.0, 1.0)
    report = accounts.report()
    found = report.classes["chat"].e2e_ms
    assert found is not None
    assert found.p50 == 200.0
    assert found.p95 == pytest.approx(290.0)
    assert report.classes["none"].e2e_ms is None


def test_percentiles_are_of_the_last_1024_of_a_class() -> None:
    accounts = SloAccounts()
    accounts.record(metrics(CHAT, True, tpot_ms=7.0), 8, 0.0, 1.0)
    for k in range(1100):
        accounts.record(metrics(BY_VALUE, True, tpot_ms=float(k)), 8, 0.0, 1.0)
    report = accounts.report()
    for figures in (report.total, report.classes["default"]):
        assert figures.tpot_ms is not None
        assert figures.tpot_ms.p50 == pytest.approx(76 + 1023 * 0.5)
        assert figures.tpot_ms.p95 == pytest.approx(76 + 1023 * 0.95)
        assert figures.tpot_ms.p99 == pytest.approx(76 + 1023 * 0.99)
    chat = report.classes["chat"]
    assert chat.tpot_ms is not None
    assert chat.tpot_ms.p99 == 7.0  # rare classes keep their own
    assert report.total.requests == 1101


def test_a_request_without_times_has_none_in_the_percentiles() -> None:
    accounts = SloAccounts()
    accounts.record(replace(metrics(CHAT, False, tpot_ms=None), ttft_ms=None), 0, 0.0, 1.0)
    assert accounts.report().total.tpot_ms is None
    accounts.record(metrics(CHAT, True, tpot_ms=5.0), 3, 0.0, 1.0)
    figures = accounts.report().total
    assert figures.tpot_ms is not None
    assert (figures.tpot_ms.p50, figures.tpot_ms.p99) == (5.0, 5.0)


def test_several_threads_lose_nothing() -> None:
    accounts = SloAccounts()

    def tell() -> None:
        for _ in range(300):
            accounts.record(metrics(CHAT, True), 2, 0.0, 1.0)

    threads = [threading.Thread(target=tell) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen = accounts.report()
        assert seen.total.tokens == 2 * seen.total.requests
    for thread in threads:
        thread.join()
    assert accounts.report().total.requests == 1200


def test_stages_are_counted_one_by_one() -> None:
    accounts = SloAccounts()
    for stages in ((True, False), (True,), (), (False, True, True)):
        accounts.record(replace(metrics(CHAT, True), attained_stages=stages), 5, 0.0, 1.0)
    accounts.record(metrics(None, None), 5, 0.0, 1.0)
    resumed = replace(metrics(CHAT, True), attained_stages=(False,))
    accounts.record(resumed, 5, 0.0, 1.0, stages_before=3)
    assert accounts.stages() == {"chat": ((3, 2), (2, 1), (1, 1), (1, 0))}


def test_a_request_is_admitted_once_however_often_it_is_given_a_row() -> None:
    accounts = SloAccounts()
    request: Any = SimpleNamespace(objective=CHAT, is_declined=False, preemptions=0)
    again: Any = SimpleNamespace(objective=CHAT, is_declined=False, preemptions=1)
    accounts.note_admission([request, request, again], [], [again])
    assert accounts.admissions() == {"chat": AdmissionCounts(admitted=2, preempted=1)}


def test_implied_ttfts_are_counted_apart_and_judge_nothing() -> None:
    accounts = SloAccounts()
    for ttft_ms in (5.0, 3_000.0, None):
        asked = replace(BY_VALUE, implied_ttft_ms=2_000.0)
        ended = replace(metrics(asked, True), ttft_ms=ttft_ms)
        accounts.record(ended, 8, submitted_s=0.0, ended_s=1.0)
    found = accounts.counts()["default"]
    assert (found.judged, found.attained, found.implied, found.implied_kept) == (3, 3, 2, 1)
