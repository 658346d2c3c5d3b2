"""Replay by a clock that tests turn, and what outcomes say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from specrouter.bench.replay import (
    LoadRequest,
    ReplayAnswer,
    ReplayOutcome,
    figures,
    medians,
    replay,
)
from tests.load_requests import load_request


def request(at_s: float, objective_ms: float | None = 10.0, category: str = "chat") -> LoadRequest:
    return load_request(
        at_s=at_s, category=category, token_ids=(1, 2), new_tokens=8, objective_ms=objective_ms
    )


@dataclass
class FakeClock:
    """Time passes while somebody sleeps."""

    time_s: float = 100.0

    def now_s(self) -> float:
        return self.time_s

    def sleep_s(self, duration_s: float) -> None:
        assert duration_s > 0
        self.time_s += duration_s


@dataclass
class FakePending:
    clock: FakeClock
    done_s: float
    is_cancelled: bool = False

    @property
    def is_done(self) -> bool:
        return self.is_cancelled or self.clock.now_s() >= self.done_s

    def cancel(self) -> None:
        self.is_cancelled = True

    def answer(self) -> ReplayAnswer:
        assert self.is_done, "every request is over when answers are collected"
        return ReplayAnswer(
            ttft_ms=1.0, tpot_ms=2.0, tokens=8, error="cancelled" if self.is_cancelled else None
        )


@dataclass
class FakeService:
    """Takes so long for each request, whatever their number."""

    clock: FakeClock
    duration_s: Callable[[LoadRequest], float]
    sent_s: list[float] = field(default_factory=list)

    def send(self, request: LoadRequest) -> FakePending:
        self.sent_s.append(self.clock.now_s() - 100.0)
        return FakePending(self.clock, self.clock.now_s() + self.duration_s(request))


def test_requests_are_sent_at_their_times_although_none_has_ended() -> None:
    clock = FakeClock()
    service = FakeService(clock, lambda _: 50.0)
    outcomes = replay([request(at) for at in (0.0, 0.25, 0.25, 7.125)], service, clock)
    assert service.sent_s == pytest.approx([0.0, 0.25, 0.25, 7.125])
    assert [outcome.sent_s for outcome in outcomes] == service.sent_s
    assert 57.0 < clock.now_s() - 100.0 < 57.5  # until the last one has ended


def test_what_does_not_end_is_cancelled_and_counts_as_an_error() -> None:
    clock = FakeClock()
    service = FakeService(clock, lambda request: 1e9 if request.at_s == 1.0 else 1.0)
    outcomes = replay([request(at) for at in (0.0, 1.0, 2.0)], service, clock, drain_s=30.0)
    assert [outcome.answer.error for outcome in outcomes] == [None, "cancelled", None]


def test_watch_sees_what_is_sent_and_what_runs() -> None:
    clock, seen = FakeClock(), list[tuple[int, int]]()
    service = FakeService(clock, lambda _: 1.5)

    def watch(elapsed_s: float, sent: int, running: int) -> None:
        seen.append((sent, running))

    replay([request(at) for at in (0.0, 1.0)], service, clock, watch)
    assert list(dict.fromkeys(seen)) == [(1, 1), (2, 2), (2, 1), (2, 0)]


# Figures


def outcome(
    sent_s: float,
    tpot_ms: float | None,
    objective_ms: float | None = 10.0,
    category: str = "chat",
    error: str | None = None,
    ttft_ms: float = 100.0,
) -> ReplayOutcome:
    answer = ReplayAnswer(
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        tokens=101 if tpot_ms else 1,
        acceptance_length=2.0,
        error=error,
    )
    return ReplayOutcome(request(sent_s, objective_ms, category), sent_s, answer)


RUN = [
    outcome(0.0, 9.0),  # ends at 1.0 s, attained
    outcome(1.0, 10.0, category="code"),  # ends at 2.1 s, attained: as fast as asked is enough
    outcome(1.0, 11.0, category="code"),  # ends at 2.2 s
    outcome(2.0, 1.0, None),  # ends at 2.2 s, no objective
    outcome(4.0, 9.0, error="cancelled"),  # ends at 5.0 s, fast until it failed
]


def test_figures_are_those_by_hand() -> None:
    found = figures(RUN)
    assert found["requests"] == 5
    assert (found["errors"], found["violations"], found["attainment"]) == (1, 2, 0.5)
    assert found["duration_s"] == pytest.approx(5.0)
    assert found["goodput_tokens_per_s"] == pytest.approx(2 * 101 / 5.0)
    assert found["tokens_per_s"] == pytest.approx(5 * 101 / 5.0)
    assert found["mean_running"] == pytest.approx((1.0 + 1.1 + 1.2 + 0.2 + 1.0) / 5.0)
    assert found["tpot_ms"]["p50"] == pytest.approx(9.0)
    assert found["tpot_ms"]["p95"] == pytest.approx(10.8)  # 0.8 of the way from 10 to 11
    assert found["ttft_ms"] == {"p50": 100.0, "p95": 100.0, "p99": 100.0}
    assert found["acceptance_length"] == 2.0
    assert found["latest_ms"] == 0.0
    assert found["e2e_ms"]["p50"] == pytest.approx(1000.0)
    assert found["requests_per_s"] == pytest.approx(4 / 5.0)  # the one that failed does not count
    assert found["mean_tpot_ms"] == pytest.approx(8.0)


def test_categories_share_the_duration_of_the_run() -> None:
    found = figures(RUN)["by_category"]
    assert list(found) == ["chat", "code"]
    assert found["code"]["attainment"] == 0.5
    assert found["code"]["goodput_tokens_per_s"] == pytest.approx(101 / 5.0)
    assert found["chat"]["violations"] == 1


def test_run_without_objectives_or_tokens_has_figures_too() -> None:
    refused = ReplayOutcome(
        request(0.0, None),
        0.0,
        ReplayAnswer(ttft_ms=None, tpot_ms=None, tokens=0, error="too long"),
    )
    found = figures([refused])
    assert found["attainment"] is None
    assert found["tpot_ms"]["p99"] is None
    assert found["tokens_per_s"] == 0.0


def test_an_output_of_one_token_is_judged_only_where_it_failed() -> None:
    """It has no time per token."""
    assert figures([outcome(0.0, None)])["attainment"] is None
    assert figures([outcome(0.0, None), outcome(0.0, 11.0)])["attainment"] == 0.0
    assert figures([outcome(0.0, None, error="cancelled")])["violations"] == 1
    late = ReplayOutcome(request(1.0), 1.25, ReplayAnswer(ttft_ms=1.0, tpot_ms=1.0, tokens=2))
    assert figures([outcome(0.0, 9.0), late])["latest_ms"] == pytest.approx(250.0)


@pytest.mark.parametrize(
    ("tpot_ms", "objective_ms", "e2e_ms", "attained"),
    [
        (9.0, None, 1000.0, True),  # 100 ms and 100 tokens of 9 ms
        (9.0, None, 999.0, False),
        (9.0, 10.0, 999.0, False),
        (11.0, 10.0, 5000.0, False),
        (None, None, 100.0, True),  # one token has an end, but no time per token
        (None, 10.0, 99.0, False),
        (9.0, None, None, None),
    ],
)
def test_the_last_token_has_an_objective_of_its_own(
    tpot_ms: float | None, objective_ms: float | None, e2e_ms: float | None, attained: bool | None
) -> None:
    asked = replace(request(0.0, objective_ms), e2e_ms=e2e_ms)
    assert replace(outcome(0.0, tpot_ms), request=asked).is_attained is attained
    failed = replace(outcome(0.0, tpot_ms, error="cancelled"), request=asked)
    assert failed.is_attained is (None if attained is None else False)


def test_medians_are_over_rounds_and_leave_out_what_is_missing() -> None:
    rounds = [{"a": 1.0, "b": {"c": x}, "d": y} for x, y in ((1, None), (5, None), (3, 2.0))]
    assert medians(rounds) == {"a": 1.0, "b": {"c": 3}, "d": 2.0}
    assert medians([{"a": None}]) == {"a": None}
