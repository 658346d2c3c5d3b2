"""Engine: the decoding cycle, and the requests that are in it.

One step: admit, choose chains, share out prefill chunks, run the cycle, hand over tokens. What
changes requests is called from the engine's thread; what only looks, and `set_policy`, from any.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from modelpool import ModelPool
from processors import RejectionSampling, SharedNoise, share_chunk
from specrouter.config import TREE_SLOTS, RouterConfig, SchedulerConfig, TreesConfig
from specrouter.cycle import (
    ChainGroup,
    Commit,
    CyclePlan,
    CycleResult,
    ModelFailure,
    TargetError,
)
from specrouter.engine.admission_queue import AdmissionPace, AdmissionQueue
from specrouter.engine.request_meter import RequestMeter
from specrouter.engine.turn import Turn
from specrouter.execution.executor import Executor
from specrouter.execution.hang_guard import Abandoned, HangGuard
from specrouter.execution.model_states import StageError
from specrouter.execution.runtime import ExecutionSettings, Runtime
from specrouter.profile.decode_counts import Gain
from specrouter.profile.prediction import Workload, target_only
from specrouter.profile.profiler import PerformanceProfiler
from specrouter.request.output import Delta, FinishReason
from specrouter.request.params import MAX_DEPTH, Chain
from specrouter.request.running import RunningRequest
from specrouter.routing.decision_record import DecisionRecord
from specrouter.routing.planner import Reading, RoutePlanner
from specrouter.routing.scheduler import ModelChainScheduler
from specrouter.slo.accounts import SloAccounts
from specrouter.slo.tree_planner import TreePlanner, default_selection
from statemgr import StateManager

logger = logging.getLogger(__name__)

Ints = NDArray[np.int64]

_FIRST_QUARANTINE = 4  # cycles; doubled by every further failure
_LONGEST_QUARANTINE = 1024
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0


@dataclass(frozen=True)
class EngineState:
    """How the engine stands now, of which not all need be of the same cycle.

    Attributes:
        rows: that requests may have.
        kv_reserved_tokens: of the running requests, out of `kv_capacity_tokens`.
        kv_bytes: of the stores of models in memory.
        quarantines: how often each model was put to rest; `quarantined` rest now.
    """

    running: int
    waiting: int
    rows: int
    kv_reserved_tokens: int
    kv_capacity_tokens: int
    kv_bytes: Mapping[str, int]
    quarantines: Mapping[str, int]
    quarantined: frozenset[str]


@dataclass
class _Quarantine:
    until_cycle: int
    cycles: int


class Engine:
    def __init__(self, config: RouterConfig, pool: ModelPool) -> None:
        engine = config.engine
        self._config = config
        self._pool = pool
        parameters = {name: pool.parameter_count(name) for name in pool.names}
        self.max_request_tokens = engine.max_request_tokens(pool.longest_sequence)
        self.profiler = PerformanceProfiler(parameters)
        self.slo_accounts = SloAccounts()
        self.meter = RequestMeter(pool.target, config.slo_classes)
        self._parameters = parameters
        # A row's drafts stand behind its committed tokens, and never beyond what it reserved.
        self._manager = StateManager(
            engine.max_requests, self.max_request_tokens, engine.kv_budget_tokens, TREE_SLOTS
        )
        # Each verifier of a chain may add a token to what was drafted.
        window = MAX_DEPTH + len(pool.names) + 2
        rule = RejectionSampling() if engine.verification == "rejection" else SharedNoise()
        self.guard = HangGuard(engine.hang_timeout_s)
        execution = ExecutionSettings(engine.prefill_chunk, window, rule, self.guard)
        self._executor = Executor(Runtime.create(pool, self._manager, self.profiler, execution))
        self._waiting = AdmissionQueue()
        self._pace = AdmissionPace()
        self._running: dict[int, RunningRequest] = {}  # by row
        self._quarantined: dict[str, _Quarantine] = {}
        self._quarantines: Counter[str] = Counter()  # so far
        self._cycle = 0
        self._is_full = False  # for the first that waits
        self._planner = self._new_planner(config.scheduler, config.trees)
        # Of the policies used so far.
        self._planners = {(config.scheduler, config.trees): self._planner}
        self._policy = config.scheduler, config.trees
        self._stepping = Turn()  # state may be looked at from outside between steps
        self._stepper: int | None = None  # the thread of the last step
        self._step_began: float | None = None
        self._is_abandoned = False

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait for a row."""
        return len(self._waiting)

    @property
    def free_rows(self) -> int:
        """That requests can have at once: none while the first in the queue waits for memory."""
        return 0 if self._is_full else self._manager.rows - len(self._running)

    @property
    def running(self) -> int:
        """Requests that have a row."""
        return len(self._running)

    def state(self) -> EngineState:
        """For any thread; waits for nothing."""
        manager, names = self._manager, self._pool.names
        states = {name: manager.state(name) for name in names}
        resting = frozenset(names) - self._available()
        return EngineState(
            self.running,
            self.waiting,
            manager.rows,
            manager.reserved_tokens,
            manager.budget_tokens or manager.rows * manager.max_tokens,
            {name: state.store.nbytes for name, state in states.items() if state is not None},
            {name: self._quarantines[name] for name in names},
            resting,
        )

    def seconds_until_admitted(self, waiting: int) -> float:
        """When that many will have been admitted, if others end as they did while some waited."""
        per_request_s = self._pace.seconds_per_request(time.perf_counter()) or 0.0
        return min(max(waiting * per_request_s, _SHORTEST_WAIT_S), _LONGEST_WAIT_S)

    def can_ever_fit(self, tokens: int) -> bool:
        return self._manager.can_ever_fit(tokens)

    def enqueue(self, request: RunningRequest) -> None:
        self._waiting.push(request)

    def step(self) -> None:
        with self._a_step():
            self._step()

    @contextmanager
    def _a_step(self) -> Iterator[None]:
        """Around what must end within the configuration's `step_timeout_s`."""
        with self._stepping:
            self._stepper = threading.get_ident()
            began = self._step_began = time.monotonic()
            try:
                yield
            finally:
                if self._step_began == began:  # else another thread has taken over
                    self._step_began = None

    @property
    def step_s(self) -> float:
        """Seconds since the cycle that runs began; 0.0 between cycles."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def successor(self) -> "Engine":
        """An engine in the place of this one, which has failed: with its policy, its accounts and
        the requests that wait, and nothing of its state, whose memory it gives back."""
        self._executor.states.drop_all()
        engine = Engine(self._config, self._pool)
        engine._waiting = self._waiting
        engine.slo_accounts, engine.meter = self.slo_accounts, self.meter
        engine.set_policy(*self._policy)
        return engine

    def take_over(self, hung: str) -> None:
        """Goes on in another thread than the one that hangs in a forward of the model `hung`."""
        with self._stepping.after(self._stepper):
            self._step_began = None
            self._executor.states.abandon(hung)
            error = TimeoutError(f"a forward took more than {self.guard.limit_s:g} s")
            self._quarantine(ModelFailure(hung, error))

    def cancel_all(self) -> None:
        """Ends every request, waiting ones included."""
        self._end_all([(one, "cancelled") for one in (*self._waiting, *self._running.values())])

    def abandon(self, cause: str) -> None:
        """After a failure of the engine itself: its state is beyond use, but all are told."""
        self.abandon_running(cause)
        self._tell(self._waiting, "unserved", cause)

    def abandon_running(self, cause: str) -> None:
        """The same, but those that wait may still be served by the successor."""
        self._is_abandoned = True
        self._tell(self._running.values(), "error", cause)

    def _tell(self, requests: Iterable[RunningRequest], reason: FinishReason, cause: str) -> None:
        for request in list(requests):
            if not request.handle.is_done:
                delta = request.finish(reason, cause)
                try:
                    self._account(request, delta)
                except Exception:  # after a failure anything may be broken; all are told
                    logger.exception("a request is missing in the accounts")
                request.handle.deliver(delta)

    def check_integrity(self) -> None:
        with self._stepping:
            self._manager.check_integrity()
            assert self._manager.free_rows == self._manager.rows - len(self._running)

    @property
    def decisions(self) -> list[DecisionRecord]:
        """The last switches of chain or trees, oldest first."""
        return self._planner.records

    def baseline_tpot_ms(self) -> float:
        """The time of a token of one request alone on the target, by the times measured so far.

        It is what objectives relative to the baseline latency are times of (AdaServe, Table 2).
        """
        alone = target_only(self.profiler.snapshot(), Workload(1), self._pool.target)
        return alone.cycle_ms

    def predict(
        self,
        chain: Chain,
        depth: int,
        width: int,
        nodes: int | None,
        requests: int,
    ) -> float:
        """See `ChainRouter.predict`."""
        snapshot, workload = self.profiler.snapshot(), Workload(requests)
        scheduler = self._planner.scheduler
        option = scheduler.predict(snapshot, workload, chain, depth, width, nodes)
        return option.ms_per_token * snapshot.machine

    def set_policy(self, config: SchedulerConfig, trees: TreesConfig) -> None:
        """Routes by another policy from now on; what was learned stays."""
        with self._stepping:
            if (config, trees) not in self._planners:
                self._planners[config, trees] = self._new_planner(config, trees)
            if self._planners[config, trees] is not self._planner:
                self._planner.put_away()
            self._planner = self._planners[config, trees]
            self._policy = config, trees

    def warm_up(self) -> None:
        """Takes the target's times, or finds those of an earlier process."""
        with self._stepping:
            self._executor.states.prepare(self._pool.target)

    def preload(self) -> None:
        """Loads and times the drafters that the policy may choose, while there is room for them.

        One that fails rests, as after a cycle. May be called again.
        """
        if not self._config.engine.preload:
            return
        for name in self._planner.scheduler.drafters:
            if self._pool.is_weightless(name) or name in self._quarantined:
                continue
            if not self._pool.has_room(name):
                logger.info("%s is loaded when it is first used: the pool is full", name)
                continue
            with self._a_step():
                try:
                    self._executor.states.prepare(name)
                except StageError as error:
                    self._quarantine(error.failure)

    def _new_planner(self, config: SchedulerConfig, trees: TreesConfig) -> RoutePlanner:
        engine = self._config.engine
        strict = engine.exact == "strict"
        planner = TreePlanner(trees, default_selection(config), strict)
        if planner.branching is not None:  # SpecInfer's tree is of one size
            depth = len(planner.branching)
            config = config.model_copy(update={"depth": depth, "width": prod(planner.branching)})
        # Rejection sampling has no trees, and only a path's slots are laid out as without one.
        scheduler = ModelChainScheduler(
            config,
            self._pool.names,
            self._parameters,
            self._pool.target,
            only_paths=strict,
            rejection=engine.verification == "rejection",
            whole_trees=planner.selection == "whole",
            fit_together=self._pool.fit_together,
        )
        return RoutePlanner(scheduler, self.profiler, planner, engine.prefill_chunk)

    def _step(self) -> None:
        started = time.perf_counter()
        self._cycle += 1
        self._drop_leaving()
        self._admit()
        self._pace.note_queue(bool(self._waiting), started)
        if not self._running:
            return
        self.profiler.begin_cycle()
        plan = self._plan()
        try:
            result = self._executor.run(plan)
            if self._is_abandoned:  # a cycle that was stuck: all have been told
                raise Abandoned
        except TargetError as error:
            self._quarantine_all(error.failures)
            self._end_planned(plan, str(error))
            return
        self._deliver(result)
        self._executor.states.forget_evicted()
        elapsed_ms = (time.perf_counter() - started) * 1000
        self._planner.learn(plan, result, elapsed_ms)

    def _drop_leaving(self) -> None:
        """Ends what was cancelled, and what has run out of time."""
        leaving = [*filter(_leaves, self._waiting), *filter(_leaves, self._running.values())]
        if leaving:
            self._end_all(
                [(one, "cancelled" if one.handle.is_cancelled else "timeout") for one in leaving]
            )

    def _end_all(self, requests: Sequence[tuple[RunningRequest, FinishReason]]) -> None:
        """A request stays in the queue until it has ended: what fails in between loses none."""
        try:
            for request, reason in requests:
                self._end(request, reason)
        finally:
            self._waiting.take_out(lambda request: request.handle.is_done)

    def _admit(self) -> None:
        """In the order of their admission keys, while there are rows and memory."""
        self._is_full = False
        while self._waiting:
            request = self._waiting.first
            prompt = request.spec
            row = self._manager.allocate(prompt.committed, prompt.reserve_tokens)
            if row is None:
                self._is_full = True
                return
            self._waiting.pop()
            request.row = row
            self._running[row] = request
            try:
                self._executor.open(row, prompt)
            except Exception as error:  # no memory for its noise, say: nobody else suffers by it
                logger.exception("request %d cannot begin", request.handle.request_id)
                self._end(request, "error", f"{type(error).__name__}: {error}")
            else:
                self.profiler.record_prompt(len(prompt.token_ids))

    def _plan(self) -> CyclePlan:
        """Rows whose prompt the target has read decode; the others share the prefill chunk."""
        admitted = np.fromiter(self._running, dtype=np.int64)  # in the order of their admission
        rows = np.sort(admitted)
        lags = self._executor.states.target_lag(rows)
        # A verified row lags by nothing; the last chunk of a prompt brings the first token.
        unread = np.where(lags > 0, lags + 1, 0)
        first_come = np.searchsorted(rows, admitted)
        chunks = np.empty_like(unread)
        chunks[first_come] = share_chunk(unread[first_come], self._config.engine.prefill_chunk)
        ends_prompt = (lags > 0) & (chunks == lags + 1)
        reading = (lags > 0) & (chunks > 0) & ~ends_prompt
        prefill_counts = np.minimum(chunks[reading], lags[reading])
        decoding, first_tokens = rows[lags == 0], rows[ends_prompt]
        prompt_tokens = int(prefill_counts.sum() + chunks[ends_prompt].sum())
        groups, selector = self._planner.plan(
            {row: self._running[row] for row in decoding.tolist()},
            self._cycle,
            self._available(),
            self._executor,
            Reading(prompt_tokens, len(rows) - len(decoding)),
            time.perf_counter(),
        )
        if len(first_tokens):
            groups.append(ChainGroup((self._pool.target,), 1, first_tokens))
        evaluation = self._planner.shadow_evaluation
        return CyclePlan(groups, rows[reading], prefill_counts, selector, evaluation)

    def _available(self) -> frozenset[str]:
        """Models that may be used: a quarantined one may be tried again after its time."""
        return frozenset(
            name
            for name in self._pool.names
            if (rest := self._quarantined.get(name)) is None or rest.until_cycle <= self._cycle
        )

    def _deliver(self, result: CycleResult) -> None:
        failed = self._quarantine_all(result.failures)
        for request, commit, delta in self._accept(result.commits):
            for name in set(commit.chain[:-1]) - failed:
                self._quarantined.pop(name, None)
            if request.finished:
                self._conclude(request, delta)
            else:
                request.handle.deliver(delta)
        for row, error in result.errors.items():
            if row in self._running:  # else its text has ended before the place that failed
                self._end(self._running[row], "error", error)

    def _accept(self, commits: Sequence[Commit]) -> list[tuple[RunningRequest, Commit, Delta]]:
        """What the requests make of a cycle's tokens; it is counted before anybody hears of it."""
        news = []
        for commit in commits:
            request = self._running[commit.row]
            news.append((request, commit, _delta_of(request, commit)))
        gains = [
            Gain(
                commit.chain,
                commit.drafted,
                len(commit.tokens),
                len(delta.token_ids),
                request.last_gap_s,
            )
            for request, commit, delta in news
        ]
        self.profiler.record_gains(gains, self._planner.budget_tokens)
        return news

    def _quarantine_all(self, failures: Iterable[ModelFailure]) -> set[str]:
        """Once per model, however many groups it failed in this cycle. Returns the names."""
        by_model = {failure.model: failure for failure in failures}
        for failure in by_model.values():
            self._quarantine(failure)
        return set(by_model)

    def _quarantine(self, failure: ModelFailure) -> None:
        before = self._quarantined.get(failure.model)
        cycles = _FIRST_QUARANTINE if before is None else 2 * before.cycles
        cycles = min(cycles, _LONGEST_QUARANTINE)
        self._quarantined[failure.model] = _Quarantine(self._cycle + cycles, cycles)
        self._quarantines[failure.model] += 1
        logger.warning(
            "%s failed and rests for %d cycles: %s: %s",
            failure.model,
            cycles,
            type(failure.error).__name__,
            failure.error,
        )

    def _end_planned(self, plan: CyclePlan, error: str) -> None:
        rows = [row for group in plan.groups for row in group.rows.tolist()]
        for row in [*rows, *plan.prefill_rows.tolist()]:
            self._end(self._running[row], "error", error)

    def _end(self, request: RunningRequest, reason: FinishReason, error: str | None = None) -> None:
        if reason == "error":
            handle = request.handle
            logger.warning(
                "request %d failed: %s", handle.request_id, error, extra=handle.log_extra
            )
        self._conclude(request, request.finish(reason, error))

    def _conclude(self, request: RunningRequest, delta: Delta) -> None:
        """Frees the row before the caller is told, who may rely on that."""
        for planner in self._planners.values():
            planner.forget(request)
        if request.row is not None:
            self._executor.close(request.row)
        self._account(request, delta)
        is_heard = request.handle.deliver(delta)
        assert is_heard or self._is_abandoned, "a request ends once"
        if request.row is not None:
            del self._running[request.row]
            request.row = None

    def _account(self, request: RunningRequest, delta: Delta) -> None:
        """Before the caller is told, who may ask for the report at once."""
        assert delta.output is not None, "only the last delta ends a request"
        metrics, tokens = delta.output.metrics, request.produced_tokens
        ended_s = time.perf_counter()
        if request.row is not None:
            self._pace.note_end(ended_s)
        self.slo_accounts.record(metrics, tokens, request.submitted_s, ended_s)
        self.meter.record(delta.output, ended_s - request.submitted_s)


def _leaves(request: RunningRequest) -> bool:
    return request.handle.is_cancelled or request.is_late


def _delta_of(request: RunningRequest, commit: Commit) -> Delta:
    """What a request makes of its tokens. One whose text cannot be made ends, and no other."""
    try:
        return request.accept(
            commit.tokens, commit.chain, commit.logprobs, commit.prompt_logprobs, commit.drafted
        )
    except Exception as error:
        logger.exception("request %d cannot go on", request.handle.request_id)
        return request.finish("error", f"the tokens could not be made text: {error}")
