"""EngineView: all that policies may know of the engine at the beginning of a cycle.

Contract: frozen, and made of plain values: the same view always gives the same decision, in the
engine, in a simulation or later. What a policy needs in the next cycle from this one leaves with
its plan as `Standing`, and returns with the next view.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrouter.cycle import Bools, DraftShape, Floats, Ints, Option
from specrouter.profile.prediction import OptionGrid
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.request.params import Chain

Objects = NDArray[np.object_]
Override = tuple[int | None, int | None]  # depth and width that a request asks for; None: not given
SCHEDULED: Override = (None, None)

NOT_BELIEVED = 1.0  # `EngineView.prediction_error` before anything is learned


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


@dataclass(frozen=True, eq=False, kw_only=True)
class RequestTable:
    """Requests, with one column [R] for each property. NaN: there is no such objective or number.

    Attributes:
        row: KV row; -1 while it waits.
        priority_key: the request with the lowest key is admitted first.
        kv_tokens: KV memory that it needs to begin or, while it runs, frees at its end.
        unread: tokens before its last one that the target has not read; 0: it decodes.
        unread_by: the same of the other models with weights, by model.
        remaining: most tokens that it can still get; `max_new_tokens`: of its whole output.
        decoded: tokens after its first one; `decode_ms`: time since that one. In an objective with
            stages, both count from the end of the stage before.
        repeatable: output tokens whose choice can be repeated, as shadow evaluations do.
        slots: KV slots that attention reads for it.
        tpot_ms: TPOT of its current stage, or of the whole output without stages.
        tightest_ms: the least TPOT of the current and later stages.
        until_tokens: `decoded` at which its stage ends, if that is a number of tokens.
        ttft_ms, e2e_ms: objectives for the first token and for the whole output.
        implied_ttft_ms: implied TTFT of a request without a deadline; a request is never too late
            for it.
        run_ms: time since `decoded` was a multiple of ten, if TPOT is judged by such runs.
        output_tokens: length of its output, if known, as in a simulation, else the usual one of its
            SLO class, if that is known.
        has_stages: its objective has stages.
        declined: it is served as best effort.
        rejects: it ends with an error when it is declined.
        promised: since it got its row, it is predicted to attain its objective.
        awaits_first: it runs, and has no first token yet.
        drafts: cycles in which it had a draft.
        acceptance: share of the last draft that the target accepted.
        override: what it asks of speculation, `SpeculationOverride`.
    """

    id: Ints
    row: Ints
    priority_key: Floats
    arrived_s: Floats
    kv_tokens: Ints
    unread: Ints
    unread_by: Mapping[str, Ints]
    remaining: Ints
    max_new_tokens: Ints
    decoded: Ints
    decode_ms: Floats
    repeatable: Ints
    slots: Ints
    tpot_ms: Floats
    tightest_ms: Floats
    until_tokens: Floats
    ttft_ms: Floats
    e2e_ms: Floats
    implied_ttft_ms: Floats
    run_ms: Floats
    output_tokens: Floats
    has_stages: Bools
    sampled: Bools
    declined: Bools
    rejects: Bools
    promised: Bools
    awaits_first: Bools
    drafts: Ints
    acceptance: Floats
    override: Objects

    def __len__(self) -> int:
        return len(self.id)

    def take(self, which: Ints | Bools) -> "RequestTable":
        """Return the requests at these places, or those for which a mask holds."""
        if which.dtype == np.bool_ and which.all():
            return self
        columns = dict(vars(self))
        by = {name: column[which] for name, column in columns.pop("unread_by").items()}
        return RequestTable(unread_by=by, **{name: one[which] for name, one in columns.items()})

    def joined(self, others: "RequestTable") -> "RequestTable":
        """Return these requests and others, with the same models, behind them."""
        if not len(others):
            return self
        if not len(self):
            return others
        columns, more = dict(vars(self)), dict(vars(others))
        by, more_by = columns.pop("unread_by"), more.pop("unread_by")
        return RequestTable(
            unread_by={name: np.concatenate((by[name], more_by[name])) for name in by},
            **{name: np.concatenate((one, more[name])) for name, one in columns.items()},
        )

    def by_row(self) -> "RequestTable":
        """Return the requests in ascending order of their rows."""
        rows = self.row
        return self if (rows[:-1] < rows[1:]).all() else self.take(np.argsort(rows))

    def at(self, rows: Ints) -> Ints:
        """Return the places of these rows, where the requests are ordered by row."""
        return np.searchsorted(self.row, rows)

    def among(self, ids: Collection[int]) -> Bools:
        """Return the mask [R] of the requests with these ids."""
        if not (ids and len(self)):
            return np.zeros(len(self), dtype=np.bool_)
        return np.isin(self.id, list(ids))

    @property
    def has_deadline(self) -> Bools:
        """True [R] for objectives with a TTFT or an end-to-end latency."""
        return ~(np.isnan(self.ttft_ms) & np.isnan(self.e2e_ms))


@dataclass(frozen=True, eq=False, kw_only=True)
class EngineView:
    """The engine at the beginning of a cycle; see the module.

    Attributes:
        now_s: time on the clock of `RequestTable.arrived_s`.
        running: running requests in the order of their admission.
        waiting: requests that may be admitted next, in the order of admission.
        kv_free_tokens: KV memory that is not reserved, less what running requests will take next;
            None: without a limit.
        available: models that are not in quarantine.
        loaded: models that can draft at once.
        drafts: False in the few cycles without drafts that measure the speedup of drafting.
        resting: why drafting rests, if it was measured to be slower; else None.
        prediction_error: share of admission's recent predictions that were wrong.
    """

    cycle: int
    now_s: float
    running: RequestTable
    waiting: RequestTable
    free_rows: int
    kv_free_tokens: int | None
    available: frozenset[str]
    loaded: frozenset[str]
    performance: PerformanceSnapshot
    standing: Standing = field(default_factory=Standing)
    prediction_error: float = NOT_BELIEVED
    drafts: bool = True
    resting: str | None = None

    def with_running(self, came: RequestTable) -> "EngineView":
        """Return the view after waiting requests got rows; `came` replaces their entries."""
        if not len(came):
            return self
        left = self.waiting.take(~self.waiting.among(came.id.tolist()))
        return replace(self, running=self.running.joined(came), waiting=left)

    def without(self, preempted: Collection[int]) -> "EngineView":
        """Return the view without preempted requests, given by id.

        They are in neither table until the next cycle.
        """
        if not preempted:
            return self
        return replace(self, running=self.running.take(~self.running.among(preempted)))
