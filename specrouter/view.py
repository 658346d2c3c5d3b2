"""EngineView: all that policies may know of the engine at the beginning of a cycle.

Contract: frozen, and made of plain values: the same view always gives the same decision, in the
engine, in a simulation or later. What a policy needs in the next cycle from this one leaves with
its plan as `Standing`, and returns with the next view.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from specrouter.cycle import DraftShape, Ints, Option
from specrouter.profile.prediction import OptionGrid
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.request.objective import Stage
from specrouter.request.params import Chain
from specrouter.request.spec import SpeculationOverride

Override = tuple[int | None, int | None]  # depth and width that a request asks for; None: not given
SCHEDULED: Override = (None, None)

NOT_BELIEVED = 1.0  # `EngineView.prediction_error` before anything is learned
LEAST_PACE_MARGIN = 0.1  # least `EngineView.pace_margin`, and its value before anything is learned


@dataclass(frozen=True, kw_only=True)
class ChainDecision:
    """The chosen chain, the reason, and the predicted costs of the alternatives.

    Attributes:
        alternatives: the best options of all other chains that were considered, best first.
        rests: there are no drafts, because drafting was measured to be slower.
    """

    chain: Chain
    shape: DraftShape
    reason: str = "configured"
    predicted: Option | None = None
    alternatives: tuple[Option, ...] = ()
    rests: bool = False
    predicted_ms: Mapping[Chain, float] = field(default_factory=dict)  # per token, by chain
    # Predictions for the trees of any shape, by chain that drafts.
    grids: Mapping[Chain, OptionGrid] = field(default_factory=dict, repr=False)

    @property
    def route(self) -> tuple[Chain, DraftShape]:
        return self.chain, self.shape


@dataclass(frozen=True)
class InUse:
    """A decision in use, for requests that leave the same parameters open.

    Attributes:
        requests: number of requests that it was made for.
        others: number of other requests that decoded in the same pass.
        cycle: cycle in which it was made.
        since: cycle in which the first such decision was made.
    """

    decision: ChainDecision
    requests: int
    others: int
    cycle: int
    since: int


@dataclass(frozen=True)
class Standing:
    """State that earlier cycles leave for the next decision.

    Attributes:
        in_use: decisions in use.
        waited: number of consecutive cycles without a turn, by request id.
        foreseen: predictions for chains that requests name, with the cycle of the prediction.
        evaluated_at: cycle of the last shadow evaluation.
        memories: by request id, the state of a policy that gives each request its own depth.
    """

    in_use: Mapping[Override, InUse] = field(default_factory=dict)
    waited: Mapping[int, int] = field(default_factory=dict)
    foreseen: Mapping[tuple[object, ...], tuple[int, Option]] = field(default_factory=dict)
    evaluated_at: int = -1
    memories: Mapping[int, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """A request.

    Attributes:
        priority_key: the request with the lowest key is admitted first.
        row: None while it waits.
        prompt_left: tokens before its last one that the target has not read; 0: it decodes.
        decoded: tokens after its first one.
        decode_ms: time since its first token.
        remaining: most tokens that it can still get.
        missed: unread tokens by model; models without weights have no entry.
        repeatable: output tokens whose choice can be repeated, as shadow evaluations do.
        slots: KV slots that attention reads for it.
        kv_tokens: KV memory that it needs to begin or, while it runs, frees at its end.
        implied_ttft_ms: implied TTFT of a request without a deadline; a request is never too late
            for it.
        e2e_ms: objective for the end-to-end latency.
        stages: remaining stages, the current one first. `tpot_ms` is then the objective of the
            current stage, and `decoded` and `decode_ms` count from the end of the stage before.
        run_ms: time since `decoded` was a multiple of ten, if TPOT is judged by such runs; else
            None.
        output_tokens: length of its output, if known, as in a simulation.
        declined: it is served as best effort.
        rejects: it ends with an error when it is declined.
        promised: since it got its row, it is predicted to attain its objective.
        awaits_first: it runs, and has no first token yet.
        drafts: cycles in which it had a draft.
        acceptance: share of the last draft that the target accepted.
    """

    id: int
    priority_key: float
    arrived_s: float
    kv_tokens: int
    prompt_left: int
    remaining: int
    max_new_tokens: int
    row: int | None = None
    decoded: int = 0
    decode_ms: float = 0.0
    tpot_ms: float | None = None
    ttft_ms: float | None = None
    implied_ttft_ms: float | None = None
    tier: str | None = None
    sampled: bool = True
    override: SpeculationOverride = None
    missed: Mapping[str, int] = field(default_factory=dict)
    repeatable: int = 0
    slots: int = 0
    e2e_ms: float | None = None
    stages: tuple[Stage, ...] = ()
    run_ms: float | None = None
    output_tokens: int | None = None
    declined: bool = False
    rejects: bool = False
    promised: bool = False
    awaits_first: bool = False
    drafts: int = 0
    acceptance: float = 0.0

    @property
    def has_deadline(self) -> bool:
        """True if its objective has a TTFT or an end-to-end latency."""
        return not (self.ttft_ms is self.e2e_ms is None)


@dataclass(frozen=True, eq=False, kw_only=True)
class EngineView:
    """The engine at the beginning of a cycle; see the module.

    Attributes:
        now_s: time on the clock of `RequestView.arrived_s`.
        running: running requests in the order of their admission.
        waiting: requests that may be admitted next, in the order of admission.
        kv_free_tokens: KV memory that is not reserved, less what running requests will take next;
            None: without a limit.
        available: models that are not in quarantine.
        loaded: models that can draft at once.
        drafts: False in the few cycles without drafts that measure the speedup of drafting.
        resting: why drafting rests, if it was measured to be slower; else None.
        output_tokens: usual output length by SLO class; None: requests without a class.
        pace_margin: share of every TPOT that admission reserves for what it cannot predict.
        prediction_error: share of admission's recent predictions that were wrong.
    """

    cycle: int
    now_s: float
    running: tuple[RequestView, ...]
    waiting: tuple[RequestView, ...]
    free_rows: int
    kv_free_tokens: int | None
    available: frozenset[str]
    loaded: frozenset[str]
    performance: PerformanceSnapshot
    standing: Standing = field(default_factory=Standing)
    output_tokens: Mapping[str | None, float] = field(default_factory=dict)
    pace_margin: float = LEAST_PACE_MARGIN
    prediction_error: float = NOT_BELIEVED
    drafts: bool = True
    resting: str | None = None

    @cached_property
    def by_row(self) -> dict[int, RequestView]:
        """Running requests by row, in ascending order."""
        placed = {request.row: request for request in self.running if request.row is not None}
        return dict(sorted(placed.items()))

    def with_running(self, came: Sequence[RequestView]) -> "EngineView":
        """Return the view after waiting requests got rows; `came` replaces their views."""
        ids = {request.id for request in came}
        left = tuple(request for request in self.waiting if request.id not in ids)
        return replace(self, running=(*self.running, *came), waiting=left)

    def without(self, preempted: Collection[int]) -> "EngineView":
        """Return the view without preempted requests, given by id.

        They are in neither list until the next cycle.
        """
        if not preempted:
            return self
        left = tuple(request for request in self.running if request.id not in preempted)
        return replace(self, running=left)

    def slots_of(self, rows: Ints) -> Ints:
        """Return the KV slots [R] that attention reads for each of the rows."""
        return np.array([self.by_row[row].slots for row in rows.tolist()], dtype=np.int64)

    def missed(self, model: str, rows: Ints) -> Ints:
        """Return the unread tokens [R] of a model, for each of the rows."""
        requests = self.by_row
        lacking = [requests[row].missed.get(model, 0) for row in rows.tolist()]
        return np.array(lacking, dtype=np.int64)

    def evaluable(self, model: str, rows: Ints) -> Ints:
        """Return the output tokens [R] of each row that a shadow evaluation of a drafter can use.

        The drafter has not read these tokens, and their choice can be repeated.
        """
        if model not in self.loaded:
            return np.zeros_like(rows)
        again = [self.by_row[row].repeatable for row in rows.tolist()]
        return np.minimum(self.missed(model, rows), np.array(again, dtype=np.int64))
