"""CyclePlanning: what a cycle is to do, decided by the policies as long as they make sense.

Contract: `admission` and `plan` never raise for a policy's sake. Where building the view,
admission, the planner or the selection of nodes fails, or decides what cannot be run
(`plan_check`), the cycle runs with the target alone: first come, first served, without drafts. The
policies rest then, for 4 cycles at first and twice as long each time until they do well.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from specrouter.cycle import ChainGroup, DraftShape, Ints
from specrouter.engine.plan_check import PlanCheck, PlanError
from specrouter.engine.policies import PolicyRegistry
from specrouter.engine.quarantine import BackOff
from specrouter.execution.fault_guard import FaultGuard
from specrouter.request.running import RunningRequest
from specrouter.routing.planner import Plan
from specrouter.slo.admission import Admission, AdmissionPolicy
from specrouter.view import EngineView, Standing

_MOST_CYCLES_OUT = 128  # in a row, that a request which decodes may be left out

# Of a cycle, the requests that may be admitted, in their order, and what earlier cycles left.
ViewOf = Callable[[int, Sequence[RunningRequest], Standing], EngineView]


class CyclePlanning:
    """Belongs to the engine's thread; `policies` may be read anywhere.

    Attributes: `cycle`: the number of the one that runs.
    """

    def __init__(
        self,
        policies: PolicyRegistry,
        admission_policy: AdmissionPolicy,
        view_of: ViewOf,
        check: PlanCheck,
        faults: FaultGuard,
    ) -> None:
        self.policies = policies
        self.cycle = 0
        self._admission_policy = admission_policy
        self._view_of = view_of
        self._check = check
        self._faults = faults
        self._rest = BackOff()
        self._decided: tuple[EngineView, Admission] | None = None  # of this cycle
        self._left_out: dict[int, int] = {}  # cycles in a row, by row

    def admission(self, waiting: Mapping[int, RunningRequest]) -> Admission | None:
        """Begins a cycle. None: as many as there is room for, in their order.

        `waiting`: by id, the requests that may be admitted.
        """
        self.cycle += 1
        self._decided = None
        if not self._rest.lasts(self.cycle):
            with self._faults.part("planning"):
                standing = self.policies.current.standing
                view = self._view_of(self.cycle, list(waiting.values()), standing)
                admission = self._admission_policy(view)
                self._check.check_admission(admission, waiting)
                self._decided = view, admission
            if self._decided is None:
                self._begin_rest()
        return None if self._decided is None else self._decided[1]

    def plan(self, admitted: Mapping[int, int], left: Mapping[int, int]) -> Plan:
        """Of the running requests, at least one.

        Args:
            admitted: rows by id of those that were just given one.
            left: by row, in the order of admission: tokens before its last one that the target has
                not read; 0: it decodes.
        """
        if self._decided is not None:
            with self._faults.part("planning"):
                view, admission = self._decided
                plan = self.policies.current.plan(view.admitted(admitted), admission)
                self._check.check_plan(plan, left)
                self._check_patience(plan, left)
                with self._faults.part("records"):
                    self.policies.current.keep(plan)
                return plan
            self._begin_rest()
        return target_alone(self._check.target, left, self._check.prompt_tokens)

    def judge(self, selection_failed: bool) -> None:
        """How this cycle's plan came out; one for the target alone says nothing of the policies."""
        if self._decided is None:
            return
        if selection_failed:
            self._begin_rest()
        else:
            self._rest = BackOff()

    def _begin_rest(self) -> None:
        """What the policies left behind for the next cycle may be what they failed by."""
        self._decided = None
        self._left_out = {}
        self.policies.current.standing = Standing()
        self._rest = self._rest.longer(self.cycle)

    def _check_patience(self, plan: Plan, left: Mapping[int, int]) -> None:
        """Whoever decodes takes part now and then."""
        out = left.keys() - set(plan.rows)
        known = self._left_out
        self._left_out = {row: known.get(row, 0) + 1 for row in out if not left[row]}
        if max(self._left_out.values(), default=0) > _MOST_CYCLES_OUT:
            raise PlanError(f"a request has been left out for {_MOST_CYCLES_OUT} cycles")


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
    groups = [ChainGroup((target,), DraftShape(1), _array(sorted(decoding)))] if decoding else []
    reading = sorted(chunks)
    return Plan(groups, _array(reading), _array([chunks[row] for row in reading]))


def _array(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)
