"""CyclePlanning: what a cycle is to do, decided by the policies as long as they make sense.

Contract: where building the view, admission, the planner or the selection of nodes fails, or
decides what cannot be run (`plan_check`), the error is raised and the policies rest, for 4 cycles
at first and twice as long each time until they do well. Whoever plans without them (`target_alone`)
may do so whatever is raised here.
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
from specrouter.slo.serve.feasible import MOST_TOLD, earliest_feasible
from specrouter.view import EngineView, RequestView, Standing

# In a row, that a request which decodes may be left out, or all that wait while nothing runs,
_MOST_CYCLES_OUT = 128
_MOST_CYCLES_PAUSED = 1 << 14  # and where admission pauses requests, for others' objectives

PLAN_CYCLES = 4  # that a plan is good for, while the same rows run and nothing else happens

# Of a cycle, the requests that may be admitted, in their order, and what earlier cycles left.
ViewOf = Callable[[int, Sequence[RunningRequest], Standing], EngineView]


@dataclass(frozen=True, eq=False)
class _Decided:
    """What was admitted in a cycle, and by which view."""

    cycle: int
    view: EngineView
    admission: Admission


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """What a cycle of so many requests is for, where what drafts bring is measured.

    `is_open`: it tells; else others than the policy have a say in who drafts.
    """

    meter: SpeedupMeter
    requests: int
    is_open: bool
    drafts: bool
    resting: Speedup | None


@dataclass(frozen=True, eq=False)
class _StandingPlan:
    """A plan that may be run again, of a cycle and a policy."""

    cycle: int
    plan: Plan
    policy: Policy


class Policies(Protocol):
    """Those in use: see `PoliciesInUse`."""

    @property
    def current(self) -> Policy: ...

    @property
    def admits(self) -> Admit: ...

    @property
    def preempts(self) -> bool: ...


class CyclePlanning:
    """Belongs to the engine's thread; `policies` may be read anywhere.

    A cycle calls `begin`, then `admission` and `plan` inside `resting_after_failure`, then `keep`,
    `judge` and `measure`.
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
        self._decided: _Decided | None = None  # of the last cycle in which the policies planned
        self._standing: _StandingPlan | None = None
        self._measured: _Measured | None = None  # in the cycle that runs
        self._is_plain = False  # it was planned, nobody reads a prompt, and all drafters are there
        self._drafters = frozenset[str]()  # that have ever been available
        self._left_out: dict[int, int] = {}  # cycles in a row, by row
        self._idle = 0  # cycles in a row in which nothing ran and nobody was admitted

    def begin(self, requests: int, is_open: bool) -> None:
        """A cycle, with so many requests that run, of which none has an objective that depends on
        drafts; else 0. `is_open`: whether they draft is left to the policy."""
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
            self.forget()  # what was planned for drafts, or without

    def admission(
        self, cycle: int, waiting: Mapping[int, RunningRequest], running: Collection[int]
    ) -> Admission | None:
        """None: the policies rest.

        Args:
            waiting: by id, the requests that may be admitted; `running`: ids.
        """
        if self._rest.lasts(cycle):
            return None
        view = self._view_of(cycle, list(waiting.values()), self.policies.current.standing)
        measured = self._measured
        if not view.available <= self._drafters:  # with new drafters all may be otherwise
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
        """What the first that are rejected could attain; see `MOST_TOLD`."""
        asked = {one.id: one for one in view.waiting}
        for request in [one for one in declined if one.rejects][:MOST_TOLD]:
            seen = asked[request.handle.request_id]
            request.feasible = earliest_feasible(self.policies.admits, view, seen)

    def plan(
        self,
        cycle: int,
        came: Sequence[RequestView],
        left: Mapping[int, int],
        waits: Mapping[int, int],
    ) -> Plan:
        """Of the running requests, at least one, after this cycle's `admission`.

        Args:
            came: those that were just given a row, in that order.
            left: by row, in the order of admission: tokens before its last one that the target has
                not read; 0: it decodes.
            waits: rows by those of who waits for what they read.
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
        """What the policies leave for the next cycle, where the plan of this one is theirs."""
        if self._is_theirs(cycle):
            policy = self.policies.current
            policy.keep(plan)
            lasts = plan.lasts and not policy.planner.scheduler.policy.decides_every_cycle
            kept = _StandingPlan(cycle, replace(plan, records=()), policy)
            self._standing = kept if lasts else None

    def again(self, cycle: int, rows: Collection[int]) -> Plan | None:
        """The last plan, if it is good for this cycle too, in which nobody waits and nobody has an
        objective: to plan takes as long as a tenth of a small model's pass."""
        kept = self._standing
        if kept is None or kept.policy is not self.policies.current:
            return None
        if cycle >= kept.cycle + PLAN_CYCLES or set(kept.plan.rows) != set(rows):
            return None
        self._is_plain = True
        return kept.plan

    def measure(self, drafted: bool, tokens: Sequence[int], elapsed_ms: float) -> None:
        """What drafts bring, by a cycle in which nothing failed: tokens of each text."""
        measured = self._measured
        if measured is None or not (self._is_plain and measured.is_open):
            return
        if len(tokens) == measured.requests:
            meter = measured.meter
            meter.record(len(tokens), measured.drafts, drafted, sum(tokens), elapsed_ms)

    def judge(self, cycle: int, selection_failed: bool) -> None:
        """How a cycle came out; one for the target alone says nothing of the policies."""
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
        """The last plan is good for no other cycle."""
        self._standing = None

    def rest_from(self, cycle: int) -> None:
        """The policies have failed in this cycle.

        What they left behind for the next cycle may be what they failed by.
        """
        self._decided = None
        self._left_out, self._idle = {}, 0
        self.policies.current.standing = Standing()
        self._rest = self._rest.longer(cycle)

    def _check_idle(self, is_idle: bool) -> None:
        """Nothing that runs could make room for who waits: somebody is admitted before long."""
        self._idle = self._idle + 1 if is_idle else 0
        if self._idle > _MOST_CYCLES_OUT:
            raise PlanError(f"nothing has run for {_MOST_CYCLES_OUT} cycles while requests wait")

    def _check_patience(self, plan: Plan, left: Mapping[int, int], admission: Admission) -> None:
        """Whoever decodes takes part now and then, and who is paused before long."""
        out = left.keys() - set(plan.rows)
        known = self._left_out
        self._left_out = {row: known.get(row, 0) + 1 for row in out if not left[row]}
        most = _MOST_CYCLES_PAUSED if admission.paused else _MOST_CYCLES_OUT
        if max(self._left_out.values(), default=0) > most:
            raise PlanError(f"a request has been left out for {most} cycles")


def without_waiting(admission: Admission, view: EngineView, waits: Mapping[int, int]) -> Admission:
    """Nobody reads what another one reads in this very cycle, and both begin with: that one reads
    as much as who waits for it was to, whose objective may be the tighter."""
    if not waits:
        return admission
    reading = {row: one for row, one in view.by_row.items() if one.prompt_left}
    chunks = dict(admission.chunks)
    for row, leader in waits.items():
        if row in reading and leader in reading and reading[leader].id in admission.chunks:
            chunk, leads = chunks.pop(reading[row].id, 0), reading[leader]
            if leads.id in chunks:
                chunks[leads.id] = max(chunks[leads.id], min(chunk, leads.prompt_left))
    return replace(admission, chunks=chunks)


def target_alone(target: str, left: Mapping[int, int], prompt_tokens: int) -> Plan:
    """All that decode in one group, and prompts in the order of admission; see `plan`."""
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
    """What the others do."""
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
