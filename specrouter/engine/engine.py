"""Engine: the decoding cycle, and the requests that are in it.

One step: end what leaves, admit, plan, run the cycle, hand over tokens, learn. What changes
requests is called from the engine's thread; what only looks, and `set_policy`, from any.
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from modelpool import ModelPool
from processors import RejectionSampling, SharedNoise
from specrouter.config import TREE_SLOTS, RouterConfig, SchedulerConfig, TreesConfig
from specrouter.cycle import Commit, CycleResult, DraftShape, ModelFailure, TargetError
from specrouter.engine.engine_state import EngineState
from specrouter.engine.policies import PolicyRegistry
from specrouter.engine.quarantine import Quarantine
from specrouter.engine.request_book import RequestBook
from specrouter.engine.request_meter import RequestMeter
from specrouter.engine.step_lock import StepLock
from specrouter.engine.view_builder import ViewBuilder
from specrouter.execution.executor import Executor
from specrouter.execution.hang_guard import Abandoned, HangGuard
from specrouter.execution.model_states import StageError
from specrouter.execution.runtime import ExecutionSettings, Runtime
from specrouter.profile.decode_counts import Gain
from specrouter.profile.learning import learn_cycle
from specrouter.profile.prediction import Workload, target_only
from specrouter.profile.profiler import PerformanceProfiler
from specrouter.request.output import Delta
from specrouter.request.params import MAX_DEPTH, Chain
from specrouter.request.running import RunningRequest
from specrouter.routing.decision_record import DecisionRecord
from specrouter.routing.planner import Plan
from specrouter.slo.accounts import SloAccounts
from specrouter.slo.admission import Admission, fcfs
from specrouter.view import EngineView
from statemgr import StateManager

logger = logging.getLogger(__name__)

_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
_WAITING_SHOWN = 64  # requests of the queue that a policy may choose among


class Engine:
    def __init__(self, config: RouterConfig, pool: ModelPool) -> None:
        engine = config.engine
        self._config = config
        self._pool = pool
        parameters = {name: pool.parameter_count(name) for name in pool.names}
        self.max_request_tokens = engine.max_request_tokens(pool.longest_sequence)
        self.profiler = PerformanceProfiler(parameters)
        # A row's drafts stand behind its committed tokens, and never beyond what it reserved.
        self._manager = StateManager(
            engine.max_requests, self.max_request_tokens, engine.kv_budget_tokens, TREE_SLOTS
        )
        # Each verifier of a chain may add a token to what was drafted.
        window = MAX_DEPTH + len(pool.names) + 2
        rule = RejectionSampling() if engine.verification == "rejection" else SharedNoise()
        self.guard = HangGuard(engine.hang_timeout_s)
        execution = ExecutionSettings(
            engine.prefill_chunk, window, rule, self.guard, engine.fresh_times
        )
        self._executor = Executor(Runtime.create(pool, self._manager, self.profiler, execution))
        self._views = ViewBuilder(pool, self._manager, self._executor, self.profiler)
        self._admission = fcfs(engine.prefill_chunk)
        key = config.scheduler, config.trees
        self._policies = PolicyRegistry(engine, pool, parameters, key)
        self._quarantine = Quarantine()
        meter = RequestMeter(pool.target, config.slo_classes)
        self._book = RequestBook(self._executor.close, SloAccounts(), meter)
        self._cycle = 0
        self._is_full = False  # for the first that waits
        self._stepping = StepLock()  # state may be looked at from outside between steps
        self._stepper: int | None = None  # the thread of the last step
        self._step_began: float | None = None

    # What may be asked from any thread

    @property
    def has_work(self) -> bool:
        return bool(self._book.waiting or self._book.running)

    @property
    def waiting(self) -> int:
        """Requests that wait for a row."""
        return len(self._book.waiting)

    @property
    def free_rows(self) -> int:
        """That requests can have at once: none while the first in the queue waits for memory."""
        return 0 if self._is_full else self._manager.rows - len(self._book.running)

    @property
    def slo_accounts(self) -> SloAccounts:
        return self._book.slo_accounts

    @property
    def meter(self) -> RequestMeter:
        return self._book.meter

    @property
    def step_s(self) -> float:
        """Seconds since the cycle that runs began; 0.0 between cycles."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def decisions(self) -> list[DecisionRecord]:
        """The last switches of chain or trees, oldest first."""
        return list(self._policies.current.records)

    def state(self) -> EngineState:
        manager, names = self._manager, self._pool.names
        states = {name: manager.state(name) for name in names}
        return EngineState(
            len(self._book.running),
            self.waiting,
            manager.rows,
            manager.reserved_tokens,
            manager.budget_tokens or manager.rows * manager.max_tokens,
            {name: state.store.nbytes for name, state in states.items() if state is not None},
            {name: self._quarantine.counts[name] for name in names},
            frozenset(names) - self._available(),
        )

    def seconds_until_admitted(self, waiting: int) -> float:
        """When that many will have been admitted, if others end as they did while some waited."""
        per_request_s = self._book.pace.seconds_per_request(time.perf_counter()) or 0.0
        return min(max(waiting * per_request_s, _SHORTEST_WAIT_S), _LONGEST_WAIT_S)

    def can_ever_fit(self, tokens: int) -> bool:
        return self._manager.can_ever_fit(tokens)

    def baseline_tpot_ms(self) -> float:
        """The time of a token of one request alone on the target, by the times measured so far.

        It is what objectives relative to the baseline latency are times of (AdaServe, Table 2).
        """
        alone = target_only(self.profiler.snapshot(), Workload(1), self._pool.target)
        return alone.cycle_ms

    def predict(self, chain: Chain, shape: DraftShape, requests: int) -> float:
        """See `ChainRouter.predict`."""
        snapshot, workload = self.profiler.snapshot(), Workload(requests)
        scheduler = self._policies.current.planner.scheduler
        option = scheduler.predict(snapshot, workload, chain, shape)
        return option.ms_per_token * snapshot.machine

    def check_integrity(self) -> None:
        with self._stepping:
            self._manager.check_integrity()
            assert self._manager.free_rows == self._manager.rows - len(self._book.running)

    def set_policy(self, config: SchedulerConfig, trees: TreesConfig) -> None:
        """Routes by another policy from now on; what was learned stays."""
        with self._stepping:
            self._policies.use((config, trees))

    # Before the first cycle

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
        for name in self._policies.current.planner.scheduler.drafters:
            if self._pool.is_weightless(name) or name in self._quarantine:
                continue
            if not self._pool.has_room(name):
                logger.info("%s is loaded when it is first used: the pool is full", name)
                continue
            with self._a_step():
                try:
                    self._executor.states.prepare(name)
                except StageError as error:
                    self._quarantine.add(error.failure, self._cycle)

    # A cycle

    def enqueue(self, request: RunningRequest) -> None:
        self._book.waiting.push(request)

    def step(self) -> None:
        with self._a_step():
            started_s = time.perf_counter()
            self._book.retire()
            view = self._view()
            admission = self._admission(view)
            view = self._admit(view, admission)
            if self._book.running:
                plan = self._policies.current.plan(view, admission)
                result = self._run(plan)
                if result is not None:
                    self._deliver(result, plan.budget_nodes)
                    elapsed_ms = (time.perf_counter() - started_s) * 1000
                    learn_cycle(self.profiler, plan, result, elapsed_ms)

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

    def _view(self) -> EngineView:
        """Of a new cycle. Nobody can be admitted while no row is free."""
        self._cycle += 1
        has_row = len(self._book.running) < self._manager.rows
        waiting = self._book.waiting.first_of(_WAITING_SHOWN) if has_row else ()
        standing = self._policies.current.standing
        return self._views.build(
            self._cycle, self._book.running, waiting, self._available(), standing
        )

    def _available(self) -> frozenset[str]:
        return self._quarantine.available(self._pool.names, self._cycle)

    def _admit(self, view: EngineView, admission: Admission) -> EngineView:
        """Gives requests their rows, but for those that cannot begin."""
        assert not admission.preempted, "this engine takes no rows back"
        self._is_full = admission.waits_for_memory
        rows = self._allocate(admission) if admission.admitted else {}
        self._book.pace.note_queue(bool(self._book.waiting), view.now_s)
        return view.admitted(rows)

    def _allocate(self, admission: Admission) -> dict[int, int]:
        """Rows by id."""
        rows: dict[int, int] = {}
        waiting = {request.handle.request_id: request for request in self._book.waiting}
        for each in admission.admitted:
            request = waiting[each]
            row = self._manager.allocate(request.spec.committed, request.spec.reserve_tokens)
            assert row is not None, "admission goes beyond rows or memory"
            self._book.waiting.remove(request)
            request.row = row
            self._book.running[row] = request
            try:
                self._executor.open(row, request.spec)
            except Exception as error:  # no memory for its noise, say: nobody else suffers by it
                logger.exception("request %d cannot begin", each)
                self._book.end(request, "error", f"{type(error).__name__}: {error}")
            else:
                self.profiler.record_prompt(len(request.spec.token_ids))
                rows[each] = row
        return rows

    def _run(self, plan: Plan) -> CycleResult | None:
        """None: the target has failed, and the requests have ended."""
        self.profiler.record_switches(len(plan.records))
        self.profiler.begin_cycle()
        try:
            result = self._executor.run(plan)
        except TargetError as error:
            self._quarantine.add_all(error.failures, self._cycle)
            for row in plan.rows:
                self._book.end(self._book.running[row], "error", str(error))
            return None
        if self._book.is_abandoned:  # a cycle that was stuck: all have been told
            raise Abandoned
        return result

    def _deliver(self, result: CycleResult, budget_nodes: int | None) -> None:
        failed = self._quarantine.add_all(result.failures, self._cycle)
        for request, commit, delta in self._accept(result.commits, budget_nodes):
            self._quarantine.forgive(set(commit.chain[:-1]) - failed)
            if request.finished:
                self._book.conclude(request, delta)
            else:
                request.handle.deliver(delta)
        for row, error in result.errors.items():
            if row in self._book.running:  # else its text has ended before the place that failed
                self._book.end(self._book.running[row], "error", error)
        self._executor.states.forget_evicted()

    def _accept(
        self, commits: Sequence[Commit], budget_nodes: int | None
    ) -> list[tuple[RunningRequest, Commit, Delta]]:
        """What the requests make of a cycle's tokens; it is counted before anybody hears of it."""
        news = []
        for commit in commits:
            request = self._book.running[commit.row]
            news.append((request, commit, _delta_of(request, commit)))
        gains = [_gain(*each) for each in news]
        self.profiler.record_gains(gains, budget_nodes)
        return news

    # Ends

    def cancel_all(self) -> None:
        """Ends every request, waiting ones included."""
        self._book.end_all([(one, "cancelled") for one in self._book])

    def abandon(self, cause: str) -> None:
        """After a failure of the engine itself: its state is beyond use, but all are told."""
        self.abandon_running(cause)
        self._book.tell(self._book.waiting, "unserved", cause)

    def abandon_running(self, cause: str) -> None:
        """The same, but those that wait may still be served by the successor."""
        self._book.is_abandoned = True
        self._book.tell(self._book.running.values(), "error", cause)

    def successor(self) -> "Engine":
        """An engine in the place of this one, which has failed: with its policy, its accounts and
        the requests that wait, and nothing of its state, whose memory it gives back."""
        self._executor.states.drop_all()
        engine = Engine(self._config, self._pool)
        book = self._book
        engine._book = RequestBook(
            engine._executor.close, book.slo_accounts, book.meter, book.waiting
        )
        engine.set_policy(*self._policies.current.key)
        return engine

    def take_over(self, hung: str) -> None:
        """Goes on in another thread than the one that hangs in a forward of the model `hung`."""
        with self._stepping.after(self._stepper):
            self._step_began = None
            self._executor.states.abandon(hung)
            error = TimeoutError(f"a forward took more than {self.guard.limit_s:g} s")
            self._quarantine.add(ModelFailure(hung, error), self._cycle)


def _delta_of(request: RunningRequest, commit: Commit) -> Delta:
    """What a request makes of its tokens. One whose text cannot be made ends, and no other."""
    try:
        return request.accept(
            commit.tokens, commit.chain, commit.logprobs, commit.prompt_logprobs, commit.drafted
        )
    except Exception as error:
        logger.exception("request %d cannot go on", request.handle.request_id)
        return request.finish("error", f"the tokens could not be made text: {error}")


def _gain(request: RunningRequest, commit: Commit, delta: Delta) -> Gain:
    tokens, produced = len(commit.tokens), len(delta.token_ids)
    return Gain(commit.chain, commit.drafted, tokens, produced, request.last_gap_s)
