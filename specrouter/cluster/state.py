"""ReplicaState: what a replica reports of itself; ReplicaView: the same as the router knows it.

Contract: frozen, and made of plain values that any transport can carry, without a clock: the
receiver notes the time. Policies see views, and nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specrouter.cluster.correction import UNCORRECTED, Correction
from specrouter.request.objective import Objective

Status = Literal["ready", "failed"]


@dataclass(frozen=True, kw_only=True)
class ReplicaState:
    """The state that a replica reports of itself.

    Attributes:
        running, waiting: requests with a row and without, out of `rows`.
        unread_tokens: tokens of prompts whose first token has not come, at most.
        tpot_ms: pairs of batch size and TPOT, ascending, from the replica's own times and the gain
            of its chains.
        prefill_ms: time of a prompt token, in full chunks.
        tightest_tpot_ms: smallest TPOT objective of running requests.
        baseline_tpot_ms: TPOT of one request alone on the target.
        max_request_tokens: most tokens of a request, prompt and output.
        retry_after_s: time until one more request would get a row.
        step_s: seconds since the start of the present cycle.
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
    step_s: float = 0.0

    @property
    def requests(self) -> int:
        return self.running + self.waiting

    @property
    def kv_share(self) -> float:
        """Share of KV memory that is held, 0 to 1."""
        return min(1.0, self.kv_reserved_tokens / max(1, self.kv_capacity_tokens))

    def tpot_at(self, requests: int) -> float:
        """Return the TPOT of a batch size in ms, linear between the reported ones."""
        sizes, times_ms = zip(*self.tpot_ms, strict=True)
        return float(np.interp(requests, sizes, times_ms))


@dataclass(frozen=True, kw_only=True)
class ReplicaView:
    """A replica at one moment, as the router knows it.

    Attributes:
        state: its last state, also from replies, `age_s` old.
        reported: its last state from its feed.
        sent: requests sent there since `state`.
        sent_tokens: tokens of their prompts.
        matched_tokens: tokens of the request's prompt that its prefix cache should hold.
        correction: correction of its reported times, relative to the other replicas.
    """

    name: str
    state: ReplicaState
    reported: ReplicaState
    age_s: float
    sent: int = 0
    sent_tokens: int = 0
    matched_tokens: int = 0
    correction: Correction = UNCORRECTED


@dataclass(frozen=True, kw_only=True)
class RoutedRequest:
    """A request as policies see it.

    Attributes:
        number: number of the decision, from 0 on.
        prompt_tokens: tokens to read before the next one, including generated ones.
        remaining: output tokens that may still come.
        elapsed_ms: time since its first submission.
        has_begun: its caller has received a token.
        dice: two numbers from 0 to below 1, for random policies.
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
    """The replicas to ask, best first.

    Attributes:
        terms: the numbers that decided, by name of each replica that was considered.
        excluded: replicas not to ask, and why.
        asks: replicas that do not attain the objective may decline.
    """

    order: tuple[str, ...]
    terms: Mapping[str, Mapping[str, float]]
    reason: str
    excluded: Mapping[str, str]
    asks: bool = False
