"""SimulatedService: an engine in simulated time, which decides by what decides in a real one.

A step is the engine's own: a frozen view of the requests goes to the admission policy and to the
planner, and the plan is run, here on a simulated machine (`research.sim.executor`). So policies
are told apart that a busy machine does not tell apart, within seconds. What is predicted holds here
but for chance, so it says nothing of how true predictions are on a real machine.

The same requests, seeds and policy give the same figures, whatever ran before.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np

from research.policies.adaserve import AdaServeTrees
from research.policies.named import POLICIES
from research.sim.admissions import admission_of
from research.sim.executor import SimulatedExecutor
from research.sim.knowledge import Knowledge, Known
from research.sim.machine import Machine
from research.sim.request import Commits, SimulatedRequest
from research.sim.rows import SimulatedRows
from research.sim.text import SimulatedTexts
from research.sim.view_builder import SimulatedViews
from specrouter.bench.named_policies import NamedPolicy
from specrouter.bench.replay import LoadRequest
from specrouter.config import EngineConfig, SchedulerConfig, TreesConfig
from specrouter.config.policies import NODE_SELECTIONS
from specrouter.engine.admission_queue import AdmissionQueue
from specrouter.engine.policies import Policy, planner_of
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.routing.planner import Plan, Planner
from specrouter.slo.admission import Admission, Admit
from specrouter.slo.node_selection import NodeSelection
from specrouter.slo.serve.pace_margin import PaceMargin
from specrouter.view import EngineView, RequestView

_NOT_SENT = -1  # id of a request that is only shown

# What each cycle was decided from, and what was decided.
Watch = Callable[[EngineView, Admission, EngineView, Plan | None], None]


@dataclass
class SimulatedService:
    """A service and its clock: time passes while the client sleeps.

    A cycle that has begun goes on beyond the client's time; what is sent meanwhile is met by the
    next one, as in the engine.

    Attributes:
        acceptance: of a drafter's best token, where the machine knows none of a pair.
        admission: None: the policy's own.
        batch_tokens: of Sarathi-Serve's batches; None: the machine's chunk of prompt tokens.
        knowledge: of the machine; a new one for each policy that is used.
        watch: is told of every cycle: the view, the admission, the view with the requests that it
            gave rows, and the plan, if there was one.
    """

    machine: Machine
    acceptance: float
    trees: TreesConfig
    admission: Admit | None = None
    knowledge: Callable[[Machine, SimulatedTexts], Knowledge] = Known
    watch: Watch | None = None
    batch_tokens: int | None = None
    _now_s: float = 0.0  # of the client
    _free_s: float = 0.0  # when the cycle ends that runs
    _ids: Iterable[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self._running: dict[int, SimulatedRequest] = {}  # by row, in the order of admission
        self._waiting = AdmissionQueue[SimulatedRequest]()
        self.use("target-only")

    # The service

    def use(self, policy: str | NamedPolicy, selection: NodeSelection | None = None) -> None:
        """One of `POLICIES`, from now on, and by an engine that has seen nothing before.

        `selection`: instead of the policy's own.
        """
        assert not self._unfinished, "no policy is changed while requests run"
        chosen = POLICIES[policy] if isinstance(policy, str) else policy
        machine = self.machine
        config = SchedulerConfig.model_validate({"policy": chosen.chains, **chosen.settings})
        picks: NodeSelection = selection or NODE_SELECTIONS.find(chosen.selection)
        changed: dict[str, Any] = {"selection": chosen.selection}
        if isinstance(picks, AdaServeTrees):  # under the budget and bounds that were published
            if machine.trees.budget_tokens is not None:
                changed["budget_tokens"] = machine.trees.budget_tokens
            picks = replace(picks, **machine.trees.of_trees)
        key = config, self.trees.model_copy(update=changed)
        engine = EngineConfig(prefill_chunk=machine.prefill_chunk)
        self._policy = Policy(key, planner_of(engine, machine, machine.parameters, key, picks))
        texts = SimulatedTexts(self.acceptance, machine.acceptance)
        self._admission = self.admission or admission_of(
            chosen.admission, machine, texts, self.batch_tokens
        )
        follow = frozenset(machine.drafters if machine.free_drafter_prefill else ())
        rows = SimulatedRows(machine.max_requests, machine.names, follow)
        knowledge = self.knowledge(machine, texts)
        draws = np.random.default_rng(0)
        self._rows, self._knowledge = rows, knowledge
        self._executor = SimulatedExecutor(machine, texts, rows, knowledge, draws)
        self._margin = PaceMargin()
        self._views = SimulatedViews(machine, rows, self._margin)
        self._running, self._waiting = {}, AdmissionQueue()
        self._cycle, self._is_stuck = 0, False

    @property
    def planner(self) -> Planner:
        """Of the policy in use."""
        return self._policy.planner

    @property
    def pace_margin(self) -> float:
        """See `EngineState`."""
        return self._margin.value

    @property
    def _unfinished(self) -> list[SimulatedRequest]:
        return [one for one in (*self._running.values(), *self._waiting) if not one.is_done]

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
        if not (self._running or self._waiting):
            self._executor.draws = np.random.default_rng(request.seed)
        sent = SimulatedRequest(next(iter(self._ids)), request, sent_s, kv_tokens=kv_tokens)
        for came_s, tokens in commits:
            sent.take(tokens, came_s)
        budget = self.machine.kv_tokens
        if budget is not None and sent.reserve_tokens > budget:
            sent.refusal = f"needs {sent.reserve_tokens} KV tokens of {budget}"
        else:
            self._waiting.push(sent)
            self._is_stuck = False
        return sent

    def shown(self, request: LoadRequest) -> tuple[EngineView, RequestView]:
        """What a router sees of this engine now, and what the engine would be told of a request."""
        asked = SimulatedRequest(_NOT_SENT, request, self._now_s)
        view = self._views.build(
            self._cycle,
            self._now_s,
            {row: one for row, one in self._running.items() if not one.is_done},
            self.waiting,
            self._knowledge.snapshot(),
            self._policy.standing,
        )
        return view, self._views.waiting(asked, self._now_s)

    def admits(self, view: EngineView, name: int) -> bool:
        """Would the policy in use admit the request of this id at once?"""
        return name in self._admission(view).admitted

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
        is_idle = self._is_stuck or not (self._running or self._waiting)
        return None if is_idle else self._free_s

    def begin_cycle(self, now_s: float) -> None:
        """The one that can begin now, or could have before, had the machine not stood still."""
        self._now_s, self._free_s = now_s, max(self._free_s, now_s)
        self._run_cycle()

    def _run_cycle(self) -> None:
        elapsed_ms = self._step()
        self._is_stuck = elapsed_ms is None
        if elapsed_ms is None:  # until the client sends more
            self._free_s = self._now_s
        else:
            self._free_s += elapsed_ms / 1000

    @property
    def running(self) -> list[SimulatedRequest]:
        return [one for one in self._running.values() if not one.is_done]

    @property
    def waiting(self) -> list[SimulatedRequest]:
        """In their order."""
        return [one for one in self._waiting.first_of(len(self._waiting)) if not one.is_done]

    @property
    def reserved_tokens(self) -> int:
        """Of KV memory."""
        return self._rows.reserved_tokens

    def snapshot(self) -> PerformanceSnapshot:
        """What the engine knows of its machine."""
        return self._knowledge.snapshot()

    # A cycle

    def _step(self) -> float | None:
        """Milliseconds of one cycle; None where nobody runs."""
        self._retire()
        if not (self._running or self._waiting):
            return None
        before = self._view()
        admission = self._admission(before)
        view = self._admit(before, admission)
        plan = self._policy.plan(view, admission) if self._running else None
        if self.watch is not None:
            self.watch(before, admission, view, plan)
        if plan is None or not plan.rows:
            return None
        self._policy.keep(plan)
        result, elapsed_ms = self._executor.run(plan)
        for commit in result.commits:
            request = self._running[commit.row]
            request.take(len(commit.tokens), self._free_s + elapsed_ms / 1000, commit.drafted)
        self._knowledge.learn(plan, result, elapsed_ms)
        return elapsed_ms

    def _retire(self) -> None:
        for row, request in [each for each in self._running.items() if each[1].is_done]:
            self._rows.close(row)
            del self._running[row]
            if request.is_promised and not request.is_cancelled:
                self._margin.note(kept=request.kept_pace)
        self._waiting.take_out(lambda one: one.is_done)

    def _view(self) -> EngineView:
        """Of a new cycle. Who waits is in it though no row is free: one may be taken back."""
        self._cycle += 1
        return self._views.build(
            self._cycle,
            self._free_s,
            self._running,
            self._waiting.shown(),
            self._knowledge.snapshot(),
            self._policy.standing,
        )

    def _admit(self, view: EngineView, admission: Admission) -> EngineView:
        """Gives requests their rows; takes back those of others, who keep their tokens."""
        if not (admission.admitted or admission.preempted or admission.declined):
            return view
        by_id = {one.id: one for one in (*self._running.values(), *self._waiting)}
        for each in admission.declined:
            by_id[each].is_declined, by_id[each].waiting_view = True, None
        self._margin.note_held_back(admission.held_back)
        for each in admission.preempted:
            request = by_id[each]
            assert request.row is not None, "only who runs is preempted"
            self._rows.close(request.row)
            del self._running[request.row]
            request.row = None
            self._waiting.push(request)
        placed: dict[int, int] = {}
        for each in admission.admitted:
            request = by_id[each]
            committed = request.prompt_tokens + request.tokens
            placed[each] = row = self._rows.open(committed, request.reserve_tokens)
            request.is_promised |= each in admission.promised
            self._rows.read[self.machine.target][row] = request.kv_tokens
            request.row, request.kv_tokens = row, 0  # a row that is taken back loses them
            self._waiting.remove(request)
            self._running[row] = request
        budget = self.machine.kv_tokens
        assert budget is None or self._rows.reserved_tokens <= budget, "beyond the memory"
        return view.without(admission.preempted).admitted(placed)
