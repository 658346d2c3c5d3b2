"""The engine: models, state and requests of one decoding loop, which runs `DecodingStep`.

Belongs to the engine's thread, except for the members that are marked for any thread.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from modelpool import ModelPool
from specrouter.config import (
    TREE_SLOTS,
    RouterConfig,
    SchedulerConfig,
    TreesConfig,
)
from specrouter.cycle import DraftShape
from specrouter.engine.admission_queue import waiting_time_s
from specrouter.engine.engine_state import EngineState
from specrouter.engine.fingerprint import fingerprint_of
from specrouter.engine.plan_check import PlanCheck
from specrouter.engine.policies import PoliciesInUse
from specrouter.engine.request_book import RequestBook
from specrouter.engine.request_meter import RequestMeter
from specrouter.engine.step import DecodingStep
from specrouter.engine.view_builder import ViewBuilder
from specrouter.execution.executor import Executor
from specrouter.execution.fault_guard import FaultGuard
from specrouter.execution.hang_guard import HangGuard
from specrouter.execution.model_states import StageError
from specrouter.execution.runtime import Runtime
from specrouter.execution.runtime_parts import ExecutionSettings
from specrouter.profile.cycle_times import Workload
from specrouter.profile.prediction import target_only
from specrouter.profile.profiler import PerformanceProfiler
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.request.params import MAX_DEPTH, MAX_TREE_TOKENS, Chain
from specrouter.request.running import RunningRequest
from specrouter.routing.chain_policy import ModelNames
from specrouter.view import SCHEDULED, ChainDecision
from statemgr import StateManager

logger = logging.getLogger(__name__)


class Engine:
    """One decoding loop over a pool of models.

    Attributes:
        profiler: measured times and acceptance. Any thread may read all four attributes.
        policies: the policies in use, and earlier ones.
        book: the requests, and their totals.
        steps: runs the cycles.
    """

    def __init__(self, config: RouterConfig, pool: ModelPool) -> None:
        engine = config.engine
        self._config = config
        self._pool = pool
        parameters = {name: pool.parameter_count(name) for name in pool.names}
        self.max_request_tokens = engine.max_request_tokens(pool.longest_sequence, pool.kv_tokens)
        self.profiler = PerformanceProfiler(parameters=parameters)
        self._manager = StateManager(
            engine.max_requests, self.max_request_tokens, TREE_SLOTS, pool.kv_tokens
        )
        self.guard = HangGuard(engine.hang_timeout_s)
        self._faults = FaultGuard()
        execution = _execution_settings(config, pool, self.guard, self._faults)
        runtime = Runtime.create(pool, self._manager, self.profiler, execution)
        self._executor = Executor(runtime)
        self.book = RequestBook(
            executor=self._executor,
            meter=RequestMeter(pool.target, config.slo_classes),
            faults=self._faults,
        )
        self.policies = PoliciesInUse(engine, pool, parameters, (config.scheduler, config.trees))
        self.steps = DecodingStep(
            self.book,
            ViewBuilder(pool.models, pool.draft_only, self.book, self.profiler),
            self.policies,
            PlanCheck(pool.names, pool.target, pool.draft_only, engine.most_batch_tokens),
            self.profiler,
            names=pool.names,
            prefill_chunk=engine.prefill_chunk,
        )
        self._quarantine = self.steps.quarantine
        self._unloadable: dict[str, str] = {}
        self._baseline_ms: float | None = None  # the last finite one
        self._prefill_ms = 0.0  # per prompt token
        self._began_s: float | None = None  # start of the step that runs

    # For any thread

    @property
    def has_work(self) -> bool:
        return bool(self.book.waiting or self.book.running)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a row."""
        return len(self.book.waiting)

    @property
    def free_rows(self) -> int:
        """Rows that requests can have at once; 0 while the first of the queue waits for memory."""
        return 0 if self.steps.is_full else self._manager.rows - len(self.book.running)

    @property
    def step_s(self) -> float:
        """Seconds since the cycle that runs began; 0.0 between cycles."""
        began_s = self._began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    @property
    def decision(self) -> ChainDecision:
        """The decision in use for requests that override nothing, or what one would get now."""
        in_use = self.policies.current.standing.in_use.get(SCHEDULED)
        if in_use is not None:
            return in_use.decision
        return self._choice(Workload(requests=1), self.profiler.snapshot())

    @property
    def awaited(self) -> tuple[str, ...]:
        """Drafters that are not loaded yet but will be."""
        return self._quarantine.awaited

    @property
    def unloadable(self) -> dict[str, str]:
        """Drafters that could not be loaded, with the reasons."""
        return {
            name: why for name, why in self._unloadable.items() if not self._pool.is_loaded(name)
        }

    def state(self) -> EngineState:
        manager, names = self._manager, self._pool.names
        states = {name: manager.state(name) for name in names}
        running = list(self.book.running.values())
        promising = (one for one in running if not (one.is_declined or one.spec.prefill_only))
        promised = [one.pace.tpot_ms(one.objective) for one in promising]
        return EngineState(
            running=len(running),
            waiting=self.waiting,
            rows=manager.rows,
            kv_reserved_tokens=manager.held_slots,
            kv_capacity_tokens=manager.kv_slots,
            kv_bytes={name: state.nbytes for name, state in states.items() if state is not None},
            quarantines={name: self._quarantine.counts[name] for name in names},
            quarantined=self._quarantine.resting(names, self.steps.cycle),
            control_faults=dict(self._faults.counts),
            weight_bytes=self._pool.weight_bytes(),
            unread_tokens=sum(
                one.committed_tokens
                for one in (*self.book.waiting, *running)
                if not one.produced_tokens
            ),
            tightest_tpot_ms=min((each for each in promised if each is not None), default=None),
            kv_cached_tokens=manager.cached_slots,
            cache=replace(manager.cache_counts),
            speedups=self.policies.current.speedup.speedups,
        )

    def seconds_until_admitted(self, waiting: int) -> float:
        """Return the expected time until `waiting` requests are admitted, from recent ends."""
        each_s = self._looked_up(lambda: self.book.pace.seconds_per_request(time.perf_counter()))
        return waiting_time_s(each_s, waiting)

    def can_ever_fit(self, tokens: int) -> bool:
        budget = self._config.engine.kv_budget_tokens
        return self._manager.can_ever_fit(tokens) and (budget is None or tokens <= budget)

    def baseline_tpot_ms(self) -> float:
        """Return the time per token of one request alone on the target, from measured times.

        It is the unit of objectives relative to the baseline latency (AdaServe, Table 2).
        """
        alone_ms = self._looked_up(self._alone_ms)
        if alone_ms is not None and math.isfinite(alone_ms):
            self._baseline_ms = alone_ms
        if self._baseline_ms is None:
            raise RuntimeError("the time of a token is not known")
        return self._baseline_ms

    def _alone_ms(self) -> float:
        snapshot, alone = self.profiler.snapshot(), Workload(requests=1)
        return target_only(snapshot, alone, self._pool.target).cycle_ms

    def _looked_up(self, look: Callable[[], float | None]) -> float | None:
        """Return what `look` returns, or None if it fails."""
        with self._faults.part("accounts"):
            return look()
        return None

    def predicted_prefill_ms(self) -> float:
        """Return the target's time per prompt token in full chunks, the last known one.

        It is 0.0 at first; implied TTFTs then have their minimum.
        """
        self._faults.each("accounts", self._predict_prefill)
        return self._prefill_ms

    def _predict_prefill(self) -> None:
        known, chunk = self.profiler.snapshot(), self._config.engine.prefill_chunk
        found_ms = known.machine * known.times[self._pool.target].at(chunk) / chunk
        if math.isfinite(found_ms):
            self._prefill_ms = found_ms

    def predict(self, chain: Chain, shape: DraftShape, requests: int) -> float:
        """Return the predicted time per token; see `EngineInstruments.predict`."""
        snapshot, workload = self.profiler.snapshot(), Workload(requests=requests)
        scheduler = self.policies.current.planner.scheduler
        option = scheduler.predict(snapshot, workload, chain, shape)
        return option.ms_per_token * snapshot.machine

    def predicted_tpot_ms(self, requests: int) -> float:
        """Return the predicted TPOT of each of `requests` requests that decode together.

        The chain is the one that would be chosen, or the target alone if the policy fails.
        """
        snapshot, workload = self.profiler.snapshot(), Workload(requests=requests)
        scheduler = self.policies.current.planner.scheduler
        option = target_only(snapshot, workload, self._pool.target)
        with self._faults.part("planning"):
            chosen = self._choice(workload, snapshot)
            option = scheduler.predict(snapshot, workload, chosen.chain, chosen.shape)
        return option.ms_per_token * snapshot.machine

    def _choice(self, workload: Workload, snapshot: PerformanceSnapshot) -> ChainDecision:
        available = self._quarantine.available(self._pool.names, self.steps.cycle)
        scheduler = self.policies.current.planner.scheduler
        return scheduler.choose(snapshot, workload, ModelNames(available))

    def check_integrity(self) -> None:
        self._manager.check_integrity()
        assert self._manager.free_rows == self._manager.rows - len(self.book.running)

    def set_policy(
        self, config: SchedulerConfig, trees: TreesConfig, admission: str | None = None
    ) -> None:
        """Use another policy from now on; what was learned stays. See `PoliciesInUse`."""
        self.policies.use((config, trees), admission)

    # Before the first cycle

    def warm_up(self) -> None:
        """Load the target and time it, or read the times that an earlier process kept.

        Raises the target's load error, or `StageError` if there is no memory for its state.
        """
        self._pool.get(self._pool.target)
        self._executor.states.prepare(self._pool.target)
        self.baseline_tpot_ms()  # kept as a fallback

    def await_drafters(self) -> None:
        """Mark the drafters that the policy may choose as not available until they are loaded."""
        if self._config.engine.preload:
            drafters = self.policies.current.planner.scheduler.drafters
            wanted = (name for name in drafters if not self._executor.is_open(name))
            self._quarantine.awaited = tuple(wanted)

    def load_next(self) -> None:
        """Load and time the next awaited drafter, if the pool has room for it.

        A drafter that fails is put in quarantine, as after a failure in a cycle.
        """
        name, *others = self._quarantine.awaited
        if not self._pool.has_room(name):
            logger.info("%s is loaded when it is first used: the pool is full", name)
        else:
            with self._timed():
                try:
                    self._executor.prepare_model(name)
                except StageError as error:
                    self._quarantine.add(error.failure, self.steps.cycle)
                    # A new dict, because other threads may be iterating over the old one.
                    self._unloadable = {**self._unloadable, name: str(error.failure.error)}
        self._quarantine.awaited = tuple(others)

    # A cycle

    def enqueue(self, request: RunningRequest) -> None:
        self.book.waiting.push(request)

    def step(self) -> None:
        with self._timed():
            self.steps.run()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Record when the enclosed work began, for `step_s`."""
        self._began_s = time.monotonic()
        try:
            yield
        finally:
            self._began_s = None

    # Ends

    def cancel_all(self) -> None:
        """End every request as cancelled, waiting ones included."""
        self.book.end_all([(one, "cancelled", None) for one in self.book])

    def abandon(self, cause: str, others: Sequence[RunningRequest] = ()) -> None:
        """End all requests, and `others`, which may not be queued here, because the engine failed.

        The error that they end with has `cause`.
        """
        self.book.abandon(cause, others)


def _execution_settings(
    config: RouterConfig, pool: ModelPool, guard: HangGuard, faults: FaultGuard
) -> ExecutionSettings:
    engine = config.engine
    # Each verifier of a chain may add a token to what was drafted.
    deepest = MAX_TREE_TOKENS if pool.config.quoting else MAX_DEPTH
    return ExecutionSettings(
        prefill_chunk=engine.prefill_chunk,
        window=deepest + len(pool.names) + 2,
        guard=guard,
        fresh_times=engine.fresh_times,
        prefix_cache=engine.prefix_cache,
        faults=faults,
        fingerprint=fingerprint_of(config.pool, pool),
        output_store_tokens=engine.output_store_tokens,
    )
