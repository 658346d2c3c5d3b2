"""ReplicaState: what a replica tells of itself; ReplicaView: the same as the router may know it.

Contract: frozen, made of plain values that any transport can carry, without a clock: the receiver
notes the time. Policies see views, and nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specrouter.cluster.correction import AS_TOLD, Correction
from specrouter.request.objective import Objective

Status = Literal["ready", "failed"]


@dataclass(frozen=True, kw_only=True)
class ReplicaState:
    """Attributes:
    running, waiting: requests with a row and without, out of `rows`.
    unread_tokens: of prompts whose first token has not come, at most.
    tpot_ms: of each request, where so many decode together: pairs, ascending; by the replica's own
        times and what its chains gain.
    prefill_ms: of a prompt token, in full chunks.
    tightest_tpot_ms: of the objectives that run.
    baseline_tpot_ms: of one request alone on the target.
    max_request_tokens: prompt and output.
    retry_after_s: when one more request would be given a row.
    pace_margin: share of a TPOT that has to be kept back, as its admission has learned.
    step_s: seconds since the cycle that runs began.
    """

    running: int
    waiting: int
    rows: int
    kv_reserved_tokens: int
    kv_capacity_tokens: int
    unread_tokens: int
    tpot_ms: tuple[tuple[int, float], ...]
    prefill_ms: float
    tightest_tpot_ms: float | None
    baseline_tpot_ms: float
    max_request_tokens: int
    retry_after_s: float
    fingerprint: str
    status: Status = "ready"
    failure: str | None = None
    pace_margin: float = 0.0
    step_s: float = 0.0

    @property
    def requests(self) -> int:
        return self.running + self.waiting

    @property
    def kv_share(self) -> float:
        """Of KV memory that is held, 0 to 1."""
        return min(1.0, self.kv_reserved_tokens / max(1, self.kv_capacity_tokens))

    def tpot_at(self, requests: int) -> float:
        """Milliseconds a token, where so many decode together; linear between what is known."""
        sizes, times_ms = zip(*self.tpot_ms, strict=True)
        return float(np.interp(requests, sizes, times_ms))


@dataclass(frozen=True, kw_only=True)
class ReplicaView:
    """A replica at one moment, to the router's knowledge.

    Attributes:
        state: the last that it told, with its answers too; `age_s` old.
        told: the last that it told by itself, every so often.
        sent: requests that went there since `state`; `sent_tokens`: their prompts.
        matched_tokens: of the request's prompt, that its prefix cache should hold.
        correction: of the times that it reports, relative to the others.
    """

    name: str
    state: ReplicaState
    told: ReplicaState
    age_s: float
    sent: int = 0
    sent_tokens: int = 0
    matched_tokens: int = 0
    correction: Correction = AS_TOLD


@dataclass(frozen=True, kw_only=True)
class RoutedRequest:
    """What policies know of a request.

    Attributes:
        number: of the decision, from 0 on.
        prompt_tokens: to be read before the next token, those that were generated included.
        remaining: output tokens that may still come.
        elapsed_ms: since it was submitted first.
        has_begun: its caller has seen a token.
        dice: two numbers from 0 to below 1, for policies that draw.
    """

    number: int
    prompt_tokens: int
    remaining: int
    objective: Objective | None = None
    elapsed_ms: float = 0.0
    has_begun: bool = False
    dice: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Ranking:
    """Which replicas to ask, the best first.

    Attributes:
        terms: of each replica that was looked at, by name: the numbers that decided.
        excluded: replicas that are not to be asked, and why.
        asks: replicas that do not attain the objective may decline.
    """

    order: tuple[str, ...]
    terms: Mapping[str, Mapping[str, float]]
    reason: str
    excluded: Mapping[str, str]
    asks: bool = False
