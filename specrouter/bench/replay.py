"""Open-loop replay: requests are sent at their times, independent of the state of the service.

Contract: every request has an outcome; one that is refused, fails or does not end has an error in
it. The clock is an argument. A `ReplayService` answers: a router here, or a server elsewhere.

The figures of outcomes are attainment, goodput and latencies, in total and by category. An error
counts as a violation of the request's objective. Goodput is the tokens of requests that attained
their objective, over the time from the first submission to the last end. Requests without an
objective count in the throughput, but not in attainment and goodput. Source: AdaServe, section 6.1.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, Protocol

import numpy as np

from specrouter.bench.figures import mean_of_known
from specrouter.request.objective import Stage

_PERCENTILES = (50, 95, 99)
_TICK_S = 0.2  # period of the watch, also while it waits for the next request's time
_ROUNDING = 1.0 + 1e-9  # tolerance for sums of times
_DRAIN_S = 600.0  # after the last request was sent


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """A request of a load; objectives that are None do not exist.

    Attributes:
        at_s: time after the first request.
        objective_ms: objective for the mean time of a token after the first.
        e2e_ms: objective for the time from sending to the last token.
        ttft_ms: objective for the time from sending to the first token.
        stages: replace `objective_ms` if there are any; simulation only.
        judges_runs: TPOT is judged over every run of ten tokens instead of over the whole output or
            stage (SLOs-Serve, section 6); simulation only.
        tenant: the service may quote outputs of this tenant for it, and stores its output there.
    """

    at_s: float
    category: str
    token_ids: tuple[int, ...]
    new_tokens: int
    temperature: float
    seed: int
    objective_ms: float | None = None
    speculation: Literal["off"] | None = None
    e2e_ms: float | None = None
    ttft_ms: float | None = None
    stages: tuple[Stage, ...] = ()
    judges_runs: bool = False
    tenant: str | None = None

    @property
    def has_objective(self) -> bool:
        asked = (self.objective_ms, self.e2e_ms, self.ttft_ms)
        return bool(self.stages) or any(each is not None for each in asked)


@dataclass(frozen=True, kw_only=True)
class ReplayAnswer:
    """The result of a request, on the clock of its service.

    Attributes:
        ttft_ms: from submission to the first token; None without a token.
        tpot_ms: mean time of a token after the first; None for fewer than two.
        error: why the output is not as requested; None if it is.
        attained_stages: for each stage of the request that had tokens, whether it kept its TPOT.
        worst_run_ms: greatest mean time of a token in a full run of ten; None without one, or if it
            was not measured.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    tokens: int = 0
    acceptance_length: float | None = None
    error: str | None = None
    attained_stages: tuple[bool, ...] = ()
    worst_run_ms: float | None = None

    @property
    def e2e_ms(self) -> float | None:
        """Time from submission to the last token; None without a token."""
        if self.ttft_ms is None:
            return None
        return self.ttft_ms + (self.tpot_ms or 0.0) * max(self.tokens - 1, 0)


@dataclass(frozen=True)
class ReplayOutcome:
    """A request, the time it was sent (from the replay's start), and its answer."""

    request: LoadRequest
    sent_s: float
    answer: ReplayAnswer

    @property
    def end_s(self) -> float:
        """Time of its last token; without a token, the time it was sent."""
        return self.sent_s + (self.answer.e2e_ms or 0.0) / 1000

    @property
    def is_attained(self) -> bool | None:
        """True if it attained its objectives for TPOT, end-to-end latency and TTFT.

        None: it had no objective, or ended without an error and has too few tokens to be judged.
        The time of the first token is not part of TPOT. Source: AdaServe, section 6.1; SpecRouter,
        section 6, for the end-to-end latency.
        """
        request, answer = self.request, self.answer
        if not request.has_objective:
            return None
        if answer.error is not None:
            return False
        tpot_ms = answer.tpot_ms if answer.worst_run_ms is None else answer.worst_run_ms
        pairs = (
            (tpot_ms, None if request.stages else request.objective_ms),
            (answer.e2e_ms, request.e2e_ms),
            (answer.ttft_ms, request.ttft_ms),
        )
        judged = [
            took <= asked * _ROUNDING
            for took, asked in pairs
            if took is not None and asked is not None
        ]
        judged += answer.attained_stages
        return all(judged) if judged else None


class Pending(Protocol):
    @property
    def is_done(self) -> bool: ...

    def cancel(self) -> None: ...

    def answer(self) -> ReplayAnswer:
        """Wait for the end and return the answer; never raise."""


class ReplayService(Protocol):
    def send(self, request: LoadRequest) -> Pending:
        """Send without waiting and never raise: a refusal is an answer."""


class Clock(Protocol):
    def now_s(self) -> float: ...

    def sleep_s(self, duration_s: float) -> None: ...


Watch = Callable[[float, int, int], None]  # elapsed seconds, requests sent, requests running


def replay(
    requests: Sequence[LoadRequest],
    service: ReplayService,
    clock: Clock,
    watch: Watch = lambda elapsed_s, sent, running: None,
    drain_s: float = _DRAIN_S,
) -> list[ReplayOutcome]:
    """Replay the requests, and return their outcomes in the same order when all have ended.

    Args:
        requests: by rising time.
        service: answers them.
        clock: time of the replay.
        watch: called regularly with the elapsed time and the numbers of sent and running requests.
        drain_s: requests that have not ended this long after the last was sent are cancelled, and
            count as errors.
    """
    started_s = clock.now_s()
    sent: list[tuple[LoadRequest, float, Pending]] = []
    running: list[Pending] = []

    def look() -> int:
        running[:] = [one for one in running if not one.is_done]
        watch(clock.now_s() - started_s, len(sent), len(running))
        return len(running)

    for request in requests:
        while (left_s := started_s + request.at_s - clock.now_s()) > 0:
            look()
            clock.sleep_s(min(left_s, _TICK_S))
        sent_s, pending = clock.now_s() - started_s, service.send(request)
        sent.append((request, sent_s, pending))
        running.append(pending)
    given_up_s = clock.now_s() + drain_s
    while look() and clock.now_s() < given_up_s:
        clock.sleep_s(_TICK_S)
    for pending in running:
        pending.cancel()
    return [ReplayOutcome(request, sent_s, pending.answer()) for request, sent_s, pending in sent]


def figures(outcomes: Sequence[ReplayOutcome]) -> dict[str, Any]:
    """Return the figures of one run as JSON has them, also `by_category`; needs an outcome."""
    duration_s = max(o.end_s for o in outcomes) - min(o.sent_s for o in outcomes)
    categories = sorted({o.request.category for o in outcomes})
    late_s = (o.sent_s - o.request.at_s for o in outcomes)
    return {
        **_of_group(outcomes, duration_s),
        "duration_s": duration_s,
        "latest_ms": max(late_s) * 1000,
        "by_category": {
            category: _of_group([o for o in outcomes if o.request.category == category], duration_s)
            for category in categories
        },
    }


def medians(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the median of every figure over rounds; None if no round has it."""
    result: dict[str, Any] = {}
    for name, first in rounds[0].items():
        values = [one[name] for one in rounds if one[name] is not None]
        result[name] = medians(values) if isinstance(first, Mapping) else _median(values)
    return result


def _of_group(outcomes: Sequence[ReplayOutcome], duration_s: float) -> dict[str, Any]:
    judged = [o for o in outcomes if o.is_attained is not None]
    attained = [o for o in judged if o.is_attained]
    return {
        "requests": len(outcomes),
        "objective_ms": _median([o.request.objective_ms for o in outcomes]),
        "errors": sum(o.answer.error is not None for o in outcomes),
        "violations": len(judged) - len(attained),
        "attainment": len(attained) / len(judged) if judged else None,
        "goodput_tokens_per_s": _per_s(sum(o.answer.tokens for o in attained), duration_s),
        "tokens_per_s": _per_s(sum(o.answer.tokens for o in outcomes), duration_s),
        "requests_per_s": _per_s(sum(o.answer.error is None for o in outcomes), duration_s),
        "ttft_ms": _percentiles([o.answer.ttft_ms for o in outcomes]),
        "tpot_ms": _percentiles([o.answer.tpot_ms for o in outcomes]),
        "mean_tpot_ms": mean_of_known(o.answer.tpot_ms for o in outcomes),
        "e2e_ms": _percentiles([o.answer.e2e_ms for o in outcomes]),
        # By Little's law; requests that wait for a row are included.
        "mean_running": _per_s(sum(o.end_s - o.sent_s for o in outcomes), duration_s),
        "acceptance_length": mean_of_known(o.answer.acceptance_length for o in outcomes),
    }


def _percentiles(values: Sequence[float | None]) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    return {f"p{p}": float(np.percentile(known, p)) if known else None for p in _PERCENTILES}


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _per_s(amount: float, duration_s: float) -> float:
    return amount / duration_s if duration_s > 0 else 0.0
