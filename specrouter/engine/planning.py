"""The plan of a cycle: decisions of the policies, checked, and a pause for policies that fail.

Contract: if building the view, admission, the planner or the selection of nodes fails, or a
decision cannot be run (`plan_check`), the error is raised and the policies rest: for 4 cycles at
first, and twice as long after each further failure, until a cycle succeeds. `target_alone` plans
without them and needs nothing that may have failed here.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from specrouter.cycle import ChainGroup, DraftShape, Ints
from specrouter.engine.plan_check import PlanCheck, PlanError
from specrouter.engine.policies import Policy
from specrouter.engine.quarantine import BackOff
from specrouter.execution.fault_guard import FaultGuard
from specrouter.profile.snapshot import load_of
from specrouter.profile.speedup import Speedup, SpeedupMeter, requests_of
from specrouter.request.running import RunningRequest
from specrouter.routing.planner import Plan
from specrouter.slo.admission import Admission, Admit
from specrouter.slo.serve.feasible import MOST_ANSWERED, earliest_feasible
from specrouter.view import EngineView, RequestTable, Standing

# Most consecutive cycles in which a decoding request has no part, or requests wait and none runs.
_MOST_CYCLES_OUT = 128
_MOST_CYCLES_PAUSED = 1 << 14  # the same, if admission pauses requests for others' objectives

PLAN_CYCLES = 4  # cycles that a plan may be used for, if the same rows run and no request waits

# (cycle, requests that may be admitted in their order, what earlier cycles left) -> view
ViewOf = Callable[[int, Sequence[RunningRequest], Standing], EngineView]


@dataclass(frozen=True, eq=False)
class _Decided:
    cycle: int
    view: EngineView
    admission: Admission


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """The part of a cycle in the measurement of the speedup by drafts.

    Attributes:
        meter: collects the measurements.
        requests: running requests.
        is_open: requests leave drafting to the policy; else the cycle is not measured.
        drafts: requests may draft in this cycle.
        resting: the measured speedup because of which drafting rests; None if it does not.
    """

    meter: SpeedupMeter
    requests: int
    is_open: bool
    drafts: bool
    resting: Speedup | None


@dataclass(frozen=True, eq=False)
class _StandingPlan:
    """A plan that may be run again, with its cycle and policy."""

    cycle: int
    plan: Plan
    policy: Policy


class Policies(Protocol):
    """The policies in use; see `PoliciesInUse`."""

    @property
    def current(self) -> Policy: ...

    @property
    def admits(self) -> Admit: ...

    @property
    def preempts(self) -> bool: ...


class CyclePlanning:
    """The calls of the policies in each cycle, and what is kept between cycles.

    A cycle calls `begin`, then `admission` and `plan` inside `resting_after_failure`, then `keep`,
    `judge` and `measure`. Belongs to the engine's thread; any thread may read `policies`.
    """

    def __init__(
        self,
        policies: Policies,
        view_of: ViewOf,
        check: PlanCheck,
        faults: FaultGuard,
    ) -> None:
        self.policies = policies
        self._view_of = view_of
        self._check = check
        self._faults = faults
        self._rest = BackOff()
        self._decided: _Decided | None = None  # in the last cycle that the policies planned
        self._standing: _StandingPlan | None = None
        self._measured: _Measured | None = None  # in the cycle that runs
        self._is_plain = False  # planned, no prompts or evaluation, all drafters available
        self._drafters = frozenset[str]()  # models that have ever been available
        self._left_out: dict[int, int] = {}  # consecutive cycles without a part in them, by row
        self._idle = 0  # consecutive cycles in which requests waited and none ran

    def begin(self, requests: int, is_open: bool) -> None:
        """Begin a cycle.

        Args:
            requests: running requests; 0 if any request has an objective.
            is_open: the requests leave it to the policy whether they draft.
        """
        policy, before = self.policies.current, self._measured
        self._measured, self._is_plain = None, False
        if requests and policy.planner.scheduler.policy.evaluates:
            meter = policy.speedup
            resting = meter.resting(requests)
            drafts = meter.drafts(requests) if is_open else resting is None
            self._measured = _Measured(
                meter=meter, requests=requests, is_open=is_open, drafts=drafts, resting=resting
            )
        if self._measured != before:
            self.forget()  # it was planned with drafts, or without

    def admission(
        self, cycle: int, waiting: Mapping[int, RunningRequest], running: Collection[int]
    ) -> Admission | None:
        """Return the checked decision of admission, or None if the policies rest.

        Args:
            cycle: its number.
            waiting: the requests that may be admitted, by id.
            running: ids of the running requests.
        """
        if self._rest.lasts(cycle):
            return None
        view = self._view_of(cycle, list(waiting.values()), self.policies.current.standing)
        measured = self._measured
        if not view.available <= self._drafters:  # speedups may differ with a new drafter
            self._drafters |= view.available
            self.policies.current.speedup = SpeedupMeter()
        elif measured is not None and not measured.drafts:
            view = replace(view, drafts=measured.resting is not None, resting=_why(measured))
        admission = self.policies.admits(view)
        self._check.check_admission(admission, waiting, running)
        self._check_idle(bool(waiting) and not (running or admission.admitted))
        self._decided = _Decided(cycle, view, admission)
        if admission.declined:
            declined = [waiting[each] for each in admission.declined]
            self._faults.each("planning", lambda: self._foresee(view, declined))
        return admission

    def _foresee(self, view: EngineView, declined: Sequence[RunningRequest]) -> None:
        """Find what the first `MOST_ANSWERED` rejected requests could attain."""
        for request in [one for one in declined if one.rejects][:MOST_ANSWERED]:
            seen = view.waiting.take(view.waiting.among({request.handle.request_id}))
            request.feasible = earliest_feasible(self.policies.admits, view, seen)

    def plan(
        self,
        cycle: int,
        came: RequestTable,
        left: Mapping[int, int],
        waits: Mapping[int, int],
    ) -> Plan:
        """Return the checked plan of at least one running request, after this cycle's `admission`.

        Args:
            cycle: its number.
            came: requests that were just given a row, in that order.
            left: by row, in the order of admission: tokens before its last one that the target has
                not read; 0: it decodes.
            waits: by waiting row, the row that reads the prefix that both share.
        """
        decided = self._decided
        assert decided is not None, "nothing is planned without an admission"
        assert decided.cycle == cycle, "a cycle is planned by its own view"
        admission = decided.admission
        view = decided.view.without(admission.preempted).with_running(came)
        admission = without_waiting(admission, view, waits)
        plan = self.policies.current.plan(view, admission)
        self._check.check_plan(plan, left)
        self._check_patience(plan, left, admission)
        self._is_plain = decided.view.available == self._drafters and not any(left.values())
        self._is_plain &= plan.shadow_evaluation is None
        return plan

    def keep(self, cycle: int, plan: Plan) -> None:
        """Keep the plan and its `Standing` for the next cycles, if the policies have made it."""
        if self._is_theirs(cycle):
            policy = self.policies.current
            policy.keep(plan)
            lasts = plan.lasts and not policy.planner.scheduler.policy.decides_every_cycle
            kept = _StandingPlan(cycle, replace(plan, records=()), policy)
            self._standing = kept if lasts else None

    def again(self, cycle: int, rows: Collection[int]) -> Plan | None:
        """Return the last plan if it can be used for this cycle too, else None.

        For cycles without waiting requests and objectives. It saves a tenth of a small model's
        pass, which is the time that planning takes.
        """
        kept = self._standing
        if kept is None or kept.policy is not self.policies.current:
            return None
        if cycle >= kept.cycle + PLAN_CYCLES or set(kept.plan.rows) != set(rows):
            return None
        self._is_plain = True
        return kept.plan

    def measure(self, drafted: bool, tokens: Sequence[int], elapsed_ms: float) -> None:
        """Record a cycle without failures for the speedup; `tokens`: each request's new ones."""
        measured = self._measured
        if measured is None or not (self._is_plain and measured.is_open):
            return
        if len(tokens) == measured.requests:
            meter = measured.meter
            meter.record(len(tokens), measured.drafts, drafted, sum(tokens), elapsed_ms)

    def judge(self, cycle: int, selection_failed: bool) -> None:
        """End or extend the policies' rest by a cycle's outcome, if they have planned it."""
        if not self._is_theirs(cycle):
            return
        if selection_failed:
            self.rest_from(cycle)
        else:
            self._rest = BackOff()

    def _is_theirs(self, cycle: int) -> bool:
        return self._decided is not None and self._decided.cycle == cycle

    @contextmanager
    def resting_after_failure(self, cycle: int) -> Iterator[None]:
        try:
            yield
        except Exception:
            if not self._rest.lasts(cycle):
                self.rest_from(cycle)
            raise

    def forget(self) -> None:
        """Drop the last plan, so that it is not used again."""
        self._standing = None

    def rest_from(self, cycle: int) -> None:
        """Begin a rest after a failure, and drop the `Standing`, which may be its cause."""
        self._decided = None
        self._left_out, self._idle = {}, 0
        self.policies.current.standing = Standing()
        self._rest = self._rest.longer(cycle)

    def _check_idle(self, is_idle: bool) -> None:
        """Raise `PlanError` if requests wait for too many cycles while none runs."""
        self._idle = self._idle + 1 if is_idle else 0
        if self._idle > _MOST_CYCLES_OUT:
            raise PlanError(f"nothing has run for {_MOST_CYCLES_OUT} cycles while requests wait")

    def _check_patience(self, plan: Plan, left: Mapping[int, int], admission: Admission) -> None:
        """Raise `PlanError` if a decoding request is left out of too many consecutive plans."""
        out = left.keys() - set(plan.rows)
        known = self._left_out
        self._left_out = {row: known.get(row, 0) + 1 for row in out if not left[row]}
        most = _MOST_CYCLES_PAUSED if admission.paused else _MOST_CYCLES_OUT
        if max(self._left_out.values(), default=0) > most:
            raise PlanError(f"a request has been left out for {most} cycles")


def without_waiting(admission: Admission, view: EngineView, waits: Mapping[int, int]) -> Admission:
    """Return the admission without chunks of rows that wait for another row to read their prefix.

    The row that reads gets the larger of the two chunks: the other's objective may be the tighter.
    """
    if not waits:
        return admission
    running = view.running.take(view.running.unread > 0)
    columns = running.row.tolist(), running.id.tolist(), running.unread.tolist()
    reading = {row: (name, unread) for row, name, unread in zip(*columns, strict=True)}
    chunks = dict(admission.chunks)
    for row, leader in waits.items():
        if row in reading and leader in reading and reading[leader][0] in admission.chunks:
            chunk, (leads, unread) = chunks.pop(reading[row][0], 0), reading[leader]
            if leads in chunks:
                chunks[leads] = max(chunks[leads], min(chunk, unread))
    return replace(admission, chunks=chunks)


def target_alone(target: str, left: Mapping[int, int], prompt_tokens: int) -> Plan:
    """Return a plan without drafts, with prompts in the order of admission; `left`: see `plan`."""
    decoding: list[int] = []
    chunks: dict[int, int] = {}
    for row, unread in left.items():
        tokens = min(unread + 1, prompt_tokens) if unread else 0
        prompt_tokens -= tokens
        if not unread or tokens > unread:  # the last chunk of a prompt brings the first token
            decoding.append(row)
        elif tokens:
            chunks[row] = tokens
    groups = (
        [ChainGroup(chain=(target,), shape=DraftShape(1), rows=_array(sorted(decoding)))]
        if decoding
        else []
    )
    reading = sorted(chunks)
    return Plan(
        groups=groups,
        prefill_rows=_array(reading),
        prefill_counts=_array([chunks[row] for row in reading]),
    )


def without_row(plan: Plan, row: int) -> Plan:
    """Return the plan without one row."""
    groups = [replace(group, rows=group.rows[group.rows != row]) for group in plan.groups]
    reads, evaluation = plan.prefill_rows != row, plan.shadow_evaluation
    return replace(
        plan,
        groups=[group for group in groups if len(group.rows)],
        prefill_rows=plan.prefill_rows[reads],
        prefill_counts=plan.prefill_counts[reads],
        shadow_evaluation=None if evaluation and evaluation.row == row else evaluation,
    )


def _why(measured: _Measured) -> str | None:
    if measured.resting is None:
        return None
    at = requests_of(load_of(measured.requests))
    return f"rests: measured {measured.resting} of the speed without drafts at {at}"


def _array(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)
