"""Prediction of whether a replica can attain a request's objective, from its own measured times.

Pure. The router ranks replicas by it, and the replica decides by it again, with its state of that
moment. Source: SLOs-Serve (arXiv 2504.08784), section 4.2: load is balanced by attainability.
"""

import math
from dataclasses import dataclass, replace

from specrouter.cluster.correction import UNCORRECTED, Correction, Expected
from specrouter.cluster.state import ReplicaState, ReplicaView, RoutedRequest
from specrouter.request.objective import Objective


@dataclass(frozen=True)
class Attainability:
    """The times that a request would get at a replica.

    Attributes:
        ttft_ms: from the first submission, including the time waited so far.
        tpot_ms: predicted TPOT.
        total_ms: from now to the last token that may come.
        slack: share by which the tightest part of the objective could be tighter; below 0: it
            cannot be attained. Infinite without an objective.
        why: reason for a slack below 0.
    """

    ttft_ms: float
    tpot_ms: float
    total_ms: float
    slack: float
    why: str = ""

    @property
    def attained(self) -> bool:
        return self.slack >= 0.0


def attainability(
    state: ReplicaState,
    request: RoutedRequest,
    sent: int = 0,
    sent_tokens: int = 0,
    correction: Correction = UNCORRECTED,
) -> Attainability:
    """Predict the times of a request at a replica, corrected by `correction`.

    `sent` and `sent_tokens` are the requests on their way there, and the tokens of their prompts.
    """
    expected = _expected(state, request, sent, sent_tokens)
    tpot_ms = expected.tpot_ms * correction.tpot
    first_ms = expected.wait_ms + expected.first_ms * correction.ttft
    ttft_ms = request.elapsed_ms + first_ms
    total_ms = first_ms + tpot_ms * max(0, request.remaining - 1)
    slack, why = _slack(request, ttft_ms, tpot_ms, total_ms)
    promised_ms = state.tightest_tpot_ms
    if request.objective and promised_ms is not None and tpot_ms > promised_ms and slack >= 0:
        # The objectives of running requests were promised first.
        slack = 1.0 - tpot_ms / promised_ms
        why = f"{tpot_ms:.0f} ms a token, where {promised_ms:.0f} ms are promised to another"
    return Attainability(ttft_ms, tpot_ms, total_ms, slack, why)


def at_view(view: ReplicaView, request: RoutedRequest) -> Attainability:
    """Predict the times of a request at a replica as the router knows it."""
    return attainability(view.state, request, view.sent, view.sent_tokens, view.correction)


def expected_at(view: ReplicaView, request: RoutedRequest) -> Expected:
    """Return what is expected of an attempt at a replica."""
    expected = _expected(view.state, request, view.sent, view.sent_tokens)
    is_promised = at_view(view, request).attained
    return replace(expected, correction=view.correction, is_promised=is_promised)


def _expected(state: ReplicaState, request: RoutedRequest, sent: int, sent_tokens: int) -> Expected:
    """Return the expected times before correction."""
    requests, unread = state.requests + sent, state.unread_tokens + sent_tokens
    tpot_ms = state.tpot_at(min(requests + 1, state.rows))
    wait_ms = 0.0 if requests < state.rows else _wait_ms(state, requests)
    wait_ms = max(wait_ms, _memory_wait_ms(state, request, sent, tpot_ms))
    # Prompts are read one after the other, in the same cycles as decoding.
    first_ms = (unread + request.prompt_tokens) * state.prefill_ms + tpot_ms
    return Expected(wait_ms=wait_ms, first_ms=first_ms, tpot_ms=tpot_ms)


def _wait_ms(state: ReplicaState, requests: int) -> float:
    """Estimate the wait for a row, in proportion to the number of requests ahead."""
    before = max(1, requests - state.rows + 1)
    return state.retry_after_s * 1000 * before / max(1, state.waiting + 1)


def _memory_wait_ms(
    state: ReplicaState, request: RoutedRequest, sent: int, tpot_ms: float
) -> float:
    """Estimate the wait for KV memory.

    Waiting requests are assumed to take as much as running ones have. Of the running requests, one
    ends in each n-th part of the time of this request's tokens, where n is their number.
    """
    running = max(1, state.running)
    each = max(1.0, state.kv_reserved_tokens / running)
    before = (state.waiting + sent) * each + request.prompt_tokens + request.remaining
    lacks = state.kv_reserved_tokens + before - state.kv_capacity_tokens
    if lacks <= 0 or not state.running:
        return 0.0
    return math.ceil(lacks / each) * tpot_ms * request.remaining / running


def _slack(
    request: RoutedRequest, ttft_ms: float, tpot_ms: float, total_ms: float
) -> tuple[float, str]:
    least, why = math.inf, ""
    for name, predicted_ms, asked_ms in _parts(request, ttft_ms, tpot_ms, total_ms):
        slack = 1.0 - predicted_ms / asked_ms
        if slack < least:
            least = slack
            why = f"{name} of {predicted_ms:.0f} ms where {asked_ms:.0f} ms are asked"
    return least, why if least < 0 else ""


def _parts(
    request: RoutedRequest, ttft_ms: float, tpot_ms: float, total_ms: float
) -> list[tuple[str, float, float]]:
    """Return the parts of the objective: name, predicted time and requested time."""
    objective = request.objective or Objective()
    parts = []
    if objective.ttft_ms is not None and not request.has_begun:
        parts.append(("a TTFT", ttft_ms, objective.ttft_ms))
    tightest = [stage.tpot_ms for stage in objective.stages]
    if objective.tpot_ms is not None:
        tightest.append(objective.tpot_ms)
    if tightest:
        parts.append(("a TPOT", tpot_ms, min(tightest)))
    if objective.e2e_ms is not None:
        parts.append(("a latency", request.elapsed_ms + total_ms, objective.e2e_ms))
    return parts
