"""Whether a request should go on elsewhere because its objective is in danger where it is.

Pure. Contract: a request moves only if it would miss its objective where it is and attain it
elsewhere with something to spare, reading prompt and text anew included. So nobody moves for a
small gain, nor who is lost anyway. How often one request may move is bounded by the caller.

Source: SLOs-Serve (arXiv 2504.08784), section 4.2, hands a request over when it arrives; this is
the same judgement while it runs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specrouter.cluster.admission import at_view
from specrouter.cluster.state import Ranking, ReplicaView, RoutedRequest

SPARE = 0.2  # of its objective that the other replica must leave: predictions are off by some 10%


@dataclass(frozen=True)
class Course:
    """How far a request has come.

    Attributes:
        request: as policies know it now.
        tokens: that its caller has; `decode_ms`: since the first of them.
    """

    request: RoutedRequest
    tokens: int
    decode_ms: float


@dataclass(frozen=True)
class Escape:
    """`slack` there, and `slack_here`: shares by which the objective could be tighter."""

    replica: str
    slack: float
    slack_here: float

    @property
    def why(self) -> str:
        return (
            f"its objective would be missed by {-self.slack_here:.0%}, and at {self.replica} "
            f"{self.slack:.0%} are left"
        )


def escape(
    course: Course, here: ReplicaView, others: Sequence[ReplicaView], left: int = 0
) -> Escape | None:
    """Where to, or None: it stays.

    Args:
        here: the replica that serves it, whose state counts it; `left`: requests that have moved
            away from there since that state.
        others: that may be chosen.
    """
    if course.request.objective is None:
        return None
    stays = _slack_here(course, here, left)
    if stays >= 0.0:
        return None
    found = [(_slack_there(course, view), view.name) for view in others]
    slack, name = max(found, default=(-1.0, ""))
    return Escape(name, slack, stays) if slack >= SPARE else None


def escaping(ranking: Ranking, found: Escape | None) -> Ranking:
    """With that replica first, where it may still be chosen."""
    if found is None or found.replica not in ranking.order:
        return ranking
    others = (name for name in ranking.order if name != found.replica)
    return replace(ranking, order=(found.replica, *others), reason=found.why)


def _slack_here(course: Course, here: ReplicaView, left: int) -> float:
    state, correction = here.state, here.correction
    requests = max(1, state.requests + here.sent - left)
    told_ms = state.tpot_at(min(requests, state.rows))
    tpot_ms = told_ms * correction.tpot
    if course.request.has_begun:
        return _slack(course, tpot_ms, tpot_ms)
    # How many of those prompts are before its own is not known: all but those behind it.
    unread = max(state.unread_tokens, course.request.prompt_tokens)
    first_ms = (unread * state.prefill_ms + told_ms) * correction.ttft
    if requests > state.rows:
        first_ms += 1000 * state.retry_after_s
    return _slack(course, first_ms, tpot_ms)


def _slack_there(course: Course, there: ReplicaView) -> float:
    """Below 0, too, where others there would miss theirs."""
    request = course.request
    prompt = max(1, request.prompt_tokens - there.matched_tokens)
    moved = replace(request, prompt_tokens=prompt)
    found = at_view(there, moved)
    first_ms = found.ttft_ms - request.elapsed_ms
    promised_ms = there.state.tightest_tpot_ms
    if promised_ms is not None and found.tpot_ms > promised_ms:
        return 1.0 - found.tpot_ms / promised_ms
    return _slack(course, first_ms, found.tpot_ms)


def _slack(course: Course, next_ms: float, tpot_ms: float) -> float:
    """Of the tightest part, if the next token comes after `next_ms` and the others at `tpot_ms`."""
    request, objective = course.request, course.request.objective
    assert objective is not None, "it was asked"
    rest_ms = tpot_ms * max(0, request.remaining - 1)
    parts = []
    tpots = [stage.tpot_ms for stage in objective.stages]
    tpots += [] if objective.tpot_ms is None else [objective.tpot_ms]
    if tpots:
        decoded = max(1, course.tokens + request.remaining - 1)
        took_ms = course.decode_ms + next_ms + rest_ms if request.has_begun else rest_ms
        parts.append((took_ms, min(tpots) * decoded))
    if objective.ttft_ms is not None and not request.has_begun:
        parts.append((request.elapsed_ms + next_ms, objective.ttft_ms))
    if objective.e2e_ms is not None:
        parts.append((request.elapsed_ms + next_ms + rest_ms, objective.e2e_ms))
    return min((1.0 - took_ms / asked_ms for took_ms, asked_ms in parts), default=math.inf)
