"""EngineView: all that policies may know of the engine at the beginning of a cycle.

Contract: frozen, and made of plain values: whoever decides from a view decides the same from it
again, in the engine, in a simulation or long after. What a policy wants to know in the next cycle
of what it decided in this one goes out with its plan as `Standing`, and comes back with the view.
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

Override = tuple[int | None, int | None]  # depth and width that requests ask for; None: left open
SCHEDULED: Override = (None, None)

NOT_BELIEVED = 1.0  # of `EngineView.prediction_error`: nothing has been learned yet
LEAST_PACE_MARGIN = 0.1  # of `EngineView.pace_margin`; where nothing has been learned yet


@dataclass(frozen=True, kw_only=True)
class ChainDecision:
    """What was chosen, why, and what the alternatives were predicted to cost.

    `alternatives`: the best options of all other chains that were looked at, best first.
    `rests`: nobody drafts, since that was measured to be slower.
    """

    chain: Chain
    shape: DraftShape
    reason: str = "configured"
    predicted: Option | None = None
    alternatives: tuple[Option, ...] = ()
    rests: bool = False
    predicted_ms: Mapping[Chain, float] = field(default_factory=dict)  # per token, by chain
    # Of every chain that drafts: what its trees of any shape promise.
    grids: Mapping[Chain, OptionGrid] = field(default_factory=dict, repr=False)

    @property
    def route(self) -> tuple[Chain, DraftShape]:
        return self.chain, self.shape


@dataclass(frozen=True)
class InUse:
    """A decision in use, for requests that leave the same things open.

    Attributes:
        requests, others: that it was made for, and that decoded in the same pass.
        cycle: in which it was made; `since`: in which the first such decision was.
    """

    decision: ChainDecision
    requests: int
    others: int
    cycle: int
    since: int


@dataclass(frozen=True)
class Standing:
    """What earlier cycles left behind for the next decision.

    Attributes:
        waited: cycles in a row that requests have sat out, by id.
        foreseen: predictions for chains that requests name, with the cycle they were made in.
        evaluated_at: cycle of the last shadow evaluation.
        memories: of a policy that gives each request a depth of its own, by id.
    """

    in_use: Mapping[Override, InUse] = field(default_factory=dict)
    waited: Mapping[int, int] = field(default_factory=dict)
    foreseen: Mapping[tuple[object, ...], tuple[int, Option]] = field(default_factory=dict)
    evaluated_at: int = -1
    memories: Mapping[int, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """One request.

    Attributes:
        priority_key: who has the least is admitted first.
        row: None while it waits.
        prompt_left: tokens before its last one that the target has not read; 0: it decodes.
        decoded: tokens after its first one; `decode_ms`: time since that.
        remaining: tokens that it may still gain.
        missed: tokens of it that each model has not read; none for models without weights.
        repeatable: output tokens whose choice could be made again, as shadow evaluations do.
        slots: KV slots that attention reads for it.
        kv_tokens: KV memory that it needs to begin, or, while it runs, that is free when it ends.
        implied_ttft_ms: of a request that states no deadline; it is never too late for it.
        e2e_ms: objective of the end-to-end latency.
        stages: that are left, the current one first. `tpot_ms` is then the current one's, and
            `decoded` and `decode_ms` are since the end of the one before.
        run_ms: since `decoded` was a multiple of ten, where TPOT is judged by such runs; else None.
        output_tokens: length of its output, where it is known, as in a simulation.
        declined: it is served as if it had no objective.
        rejects: it ends, instead, when it is declined.
        promised: it is predicted to attain its objective, since it was given its row.
        awaits_first: it runs, and its first token has not come.
        drafts: cycles in which something was drafted for it; `acceptance`: share of the last draft
            that the target accepted.
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
        """Of more than the pace of its output."""
        return not (self.ttft_ms is self.e2e_ms is None)


@dataclass(frozen=True, eq=False, kw_only=True)
class EngineView:
    """See the module.

    Attributes:
        now_s: of the clock that `RequestView.arrived_s` is of.
        running: in the order of their admission.
        waiting: those that may be admitted next, first come those that are to be.
        kv_free_tokens: of KV memory that nobody holds, without what running requests are about to
            take; None: without bound.
        available: models that are not in quarantine.
        loaded: models that could draft at once.
        drafts: False in the few cycles without drafts that these are measured by.
        resting: why nobody drafts, where drafting was measured to be slower; else None.
        output_tokens: usual lengths of outputs by SLO class, None: of those without one.
        pace_margin: share of every TPOT that admission keeps back for what it cannot foresee.
        prediction_error: share of admission's predictions that have not come true of late.
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
        """Running requests, ascending by row."""
        placed = {request.row: request for request in self.running if request.row is not None}
        return dict(sorted(placed.items()))

    def with_running(self, came: Sequence[RequestView]) -> "EngineView":
        """The view after requests that waited were given rows, seen as they are with these."""
        ids = {request.id for request in came}
        left = tuple(request for request in self.waiting if request.id not in ids)
        return replace(self, running=(*self.running, *came), waiting=left)

    def without(self, preempted: Collection[int]) -> "EngineView":
        """The view after running requests, by id, have given up their rows: they are nowhere in it
        until the next cycle."""
        if not preempted:
            return self
        left = tuple(request for request in self.running if request.id not in preempted)
        return replace(self, running=left)

    def slots_of(self, rows: Ints) -> Ints:
        """[R] KV slots that attention reads for each of the rows."""
        return np.array([self.by_row[row].slots for row in rows.tolist()], dtype=np.int64)

    def missed(self, model: str, rows: Ints) -> Ints:
        """[R] tokens of each of the rows that a model has not read."""
        requests = self.by_row
        lacking = [requests[row].missed.get(model, 0) for row in rows.tolist()]
        return np.array(lacking, dtype=np.int64)

    def evaluable(self, model: str, rows: Ints) -> Ints:
        """[R] output tokens of each of the rows that a drafter could be evaluated on: that it has
        not read, and whose choice could be made again."""
        if model not in self.loaded:
            return np.zeros_like(rows)
        again = [self.by_row[row].repeatable for row in rows.tolist()]
        return np.minimum(self.missed(model, rows), np.array(again, dtype=np.int64))
