"""SimulatedService: the engine's own step in simulated time.

Requests, admission, planning, selection and learning are the engine's (`DecodingStep`); plans are
run on a simulated machine (`research.sim.executor`). So policies are told apart that a busy machine
does not tell apart, within seconds. What is predicted holds here but for chance, so it says nothing
of how true predictions are on a real machine. Whatever fails is raised.

The same requests, seeds and policy give the same figures, whatever ran before.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np

from research.named_policies import POLICIES, NamedPolicy
from research.policies.adaserve import AdaServeTrees
from research.sim.admissions import admission_of
from research.sim.executor import SimulatedExecutor
from research.sim.knowledge import Known
from research.sim.machine import Machine
from research.sim.request import Commits, SimulatedClock, SimulatedRequest
from research.sim.rows import SimulatedRows
from research.sim.text import SimulatedTexts
from specrouter.bench.replay import LoadRequest
from specrouter.config import EngineConfig, SchedulerConfig, TreesConfig
from specrouter.config.policies import NODE_SELECTIONS
from specrouter.engine.plan_check import PlanCheck, PlanError
from specrouter.engine.policies import Policy, planner_of
from specrouter.engine.request_book import RequestBook
from specrouter.engine.request_meter import RequestMeter
from specrouter.engine.step import DecodingStep
from specrouter.engine.view_builder import ViewBuilder
from specrouter.execution.fault_guard import FaultGuard
from specrouter.profile.profiler import PerformanceProfiler
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.request.running import RunningRequest
from specrouter.routing.planner import Plan, Planner
from specrouter.slo.admission import Admission, Admit
from specrouter.slo.node_selection import NodeSelection
from specrouter.slo.serve.promises import Promises
from specrouter.view import EngineView, RequestTable

# Promises kept before the first request: a machine that is known as it is was observed for long.
_BELIEVED = 48.0
_NOT_SENT = -1  # id of a request that is only shown
_ANY_TOKENS = 1 << 40  # of prompts in a cycle: published policies have bounds of their own

# What each cycle was planned from, and the plan: the view before admission, the admission, the view
# with the requests that it gave rows, and the plan.
Watch = Callable[[EngineView, Admission, EngineView, Plan], None]


class _Faults(FaultGuard):
    """A decision that cannot be run costs what it costs in the engine. All else is raised."""

    def part(self, part: str) -> Any:
        return self._except_plans(part)

    @contextmanager
    def _except_plans(self, part: str) -> Iterator[None]:
        try:
            yield
        except PlanError:
            self.counts[part] += 1


@dataclass
class _Policies:
    """A policy and its admission, which may take rows back, and whom they are shown to."""

    current: Policy
    admit: Admit
    watch: Watch | None = None
    preempts: bool = True

    def admits(self, view: EngineView) -> Admission:
        admission = self.admit(view)
        if self.watch is not None:
            self.current = _Watched(self.current, self.watch, view, admission)
        return admission


class _Watched(Policy):
    """Tells of the next plan."""

    def __init__(
        self, policy: Policy, watch: Watch, before: EngineView, admission: Admission
    ) -> None:
        super().__init__(policy.key, policy.planner, policy.standing, policy.records)
        self._told = watch, before, admission

    def plan(self, view: EngineView, admission: Admission) -> Plan:
        plan = super().plan(view, admission)
        watch, before, decided = self._told
        watch(before, decided, view, plan)
        return plan


@dataclass(kw_only=True)
class SimulatedService:
    """A service and its clock: time passes while the client sleeps.

    A cycle that has begun goes on beyond the client's time; what is sent meanwhile is met by the
    next one, as in the engine.

    Attributes:
        acceptance: of a drafter's best token, where the machine knows none of a pair.
        admission: None: the policy's own.
        batch_tokens: of Sarathi-Serve's batches; None: the machine's chunk of prompt tokens.
        knowledge: of the machine; a new one for each policy that is used.
        watch: is told of every cycle that is planned.
        executor: runs plans.
    """

    machine: Machine
    acceptance: float
    trees: TreesConfig
    admission: Admit | None = None
    knowledge: Callable[[Machine, SimulatedTexts], PerformanceProfiler] = Known
    watch: Watch | None = None
    batch_tokens: int | None = None
    executor: Callable[..., SimulatedExecutor] = SimulatedExecutor
    _now_s: float = 0.0  # of the client
    _free_s: float = 0.0  # when the cycle ends that runs
    _ids: Iterable[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self._clock = SimulatedClock()  # of the cycle that runs
        self._set("target-only")

    # The service

    def use(self, policy: str | NamedPolicy, selection: NodeSelection | None = None) -> None:
        """One of `POLICIES`, from now on, and by an engine that has seen nothing before.

        `selection`: instead of the policy's own.
        """
        assert not [*self.running, *self.waiting], "no policy is changed while requests run"
        self._set(policy, selection)

    def _set(self, policy: str | NamedPolicy, selection: NodeSelection | None = None) -> None:
        chosen = POLICIES[policy] if isinstance(policy, str) else policy
        machine, clock = self.machine, self._clock
        config = SchedulerConfig.model_validate({"policy": chosen.chains, **chosen.settings})
        picks: NodeSelection = selection or NODE_SELECTIONS.find(chosen.selection)
        changed: dict[str, Any] = {"selection": chosen.selection}
        if isinstance(picks, AdaServeTrees):  # under the budget and bounds that were published
            if machine.trees.budget_tokens is not None:
                changed["budget_tokens"] = machine.trees.budget_tokens
            picks = replace(picks, **machine.trees.of_trees)
        key = config, self.trees.model_copy(update=changed)
        engine = EngineConfig(prefill_chunk=machine.prefill_chunk)
        texts = SimulatedTexts(self.acceptance, machine.acceptance)
        self._policies = _Policies(
            Policy(key, planner_of(engine, machine, machine.parameters, key, picks)),
            self.admission or admission_of(chosen.admission, machine, texts, self.batch_tokens),
            self.watch,
        )
        follow = frozenset(machine.drafters if machine.free_drafter_prefill else ())
        self._rows = SimulatedRows(machine.max_requests, machine.names, follow)
        self._profiler = self.knowledge(machine, texts)
        self._executor = self.executor(
            machine=machine,
            texts=texts,
            states=self._rows,
            profiler=self._profiler,
            draws=np.random.default_rng(0),
            clock=clock,
        )
        faults = _Faults()
        book = RequestBook(
            executor=self._executor,
            meter=RequestMeter(machine.target),
            faults=faults,
            clock=clock,
            promises=Promises(kept=_BELIEVED),
        )
        self._views = ViewBuilder(machine.names, (), book, self._profiler)
        self._step = DecodingStep(
            book,
            self._views,
            self._policies,
            PlanCheck(machine.names, machine.target, (), _ANY_TOKENS),
            self._profiler,
            names=machine.names,
            prefill_chunk=machine.prefill_chunk,
        )
        self._book, self._is_stuck = book, False

    @property
    def planner(self) -> Planner:
        """Of the policy in use."""
        return self._policies.current.planner

    def seconds_per_request(self) -> float | None:
        """See `AdmissionPace`."""
        return self._book.pace.seconds_per_request(self._now_s)

    def send(self, request: LoadRequest) -> SimulatedRequest:
        return self.receive(request, self._now_s)

    def receive(
        self,
        request: LoadRequest,
        sent_s: float,
        commits: Sequence[Commits] = (),
        kv_tokens: int = 0,
    ) -> SimulatedRequest:
        """A request that was sent first at `sent_s`, and has had tokens elsewhere since; the target
        need not read the first `kv_tokens`."""
        if not self._has_work:
            self._executor.draws = np.random.default_rng(request.seed)
        sent = self._made(next(iter(self._ids)), request, sent_s, commits, kv_tokens)
        budget, needed = self.machine.kv_tokens, sent.spec.total_tokens
        if budget is not None and needed > budget:
            sent.refusal = f"needs {needed} KV tokens of {budget}"
        else:
            self._book.waiting.push(sent)
            self._is_stuck = False
        return sent

    def _made(
        self, number: int, request: LoadRequest, sent_s: float, *others: Any
    ) -> SimulatedRequest:
        self._clock.now_s = sent_s
        chunk = self.machine.prefill_chunk
        prefill_ms = self.machine.times[self.machine.target].at(chunk) / chunk
        return SimulatedRequest(number, request, self._clock, prefill_ms, *others)

    def shown(self, request: LoadRequest) -> tuple[EngineView, RequestTable]:
        """What a router sees of this engine now, and what the engine would be told of a request."""
        asked = self._made(_NOT_SENT, request, self._now_s)
        view = self._views.build(
            self._step.cycle,
            [*self.waiting, asked],
            frozenset(self.machine.names),
            self._policies.current.standing,
        )
        last = len(view.waiting) - 1
        return replace(view, waiting=view.waiting.take(np.arange(last))), view.waiting.take(
            np.array([last])
        )

    def admits(self, view: EngineView, name: int) -> bool:
        """Would the policy in use admit the request of this id at once?"""
        return name in self._policies.admit(view).admitted

    # The clock

    def now_s(self) -> float:
        return self._now_s

    def sleep_s(self, duration_s: float) -> None:
        self.run_until(self._now_s + duration_s)

    def run_until(self, now_s: float) -> None:
        """All cycles that begin before."""
        self._now_s = now_s
        while self._free_s < now_s:
            self._run_cycle()

    @property
    def next_cycle_s(self) -> float | None:
        """When a cycle can begin; None: not before a request comes."""
        return None if self._is_stuck or not self._has_work else self._free_s

    def begin_cycle(self, now_s: float) -> None:
        """The one that can begin now, or could have before, had the machine not stood still."""
        self._now_s, self._free_s = now_s, max(self._free_s, now_s)
        self._run_cycle()

    def _run_cycle(self) -> None:
        self._clock.now_s = self._free_s
        if self._has_work:
            self._step.run()
        self._is_stuck = self._clock.now_s == self._free_s
        # Where nothing ran, nothing will until the client sends more.
        self._free_s = self._now_s if self._is_stuck else self._clock.now_s

    @property
    def _has_work(self) -> bool:
        return bool(self._book.running or self._book.waiting)

    @property
    def running(self) -> list[SimulatedRequest]:
        return _unfinished(self._book.running.values())

    @property
    def waiting(self) -> list[SimulatedRequest]:
        """In their order."""
        waiting = self._book.waiting
        return _unfinished(waiting.first_of(len(waiting)))

    @property
    def held_tokens(self) -> int:
        """Of KV memory."""
        return int(self._rows.held.sum())

    def snapshot(self) -> PerformanceSnapshot:
        """What the engine knows of its machine."""
        return self._profiler.snapshot()


def _unfinished(requests: Iterable[RunningRequest]) -> list[SimulatedRequest]:
    found = (one for one in requests if isinstance(one, SimulatedRequest))
    return [one for one in found if not one.is_done]
