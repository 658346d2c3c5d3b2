"""RuntimeParts: what drafters, and all else of the execution, work with."""

import time
from dataclasses import dataclass, field

from modelpool import ModelPool
from processors import Sampler
from specrouter.execution.decoding_rows import DecodingRows
from specrouter.execution.fault_guard import FaultGuard
from specrouter.execution.forward_clock import ForwardClock
from specrouter.execution.hang_guard import HangGuard
from specrouter.execution.model_states import ModelStates
from specrouter.profile.profiler import PerformanceProfiler
from statemgr import StateManager


@dataclass(frozen=True, eq=False, kw_only=True)
class ExecutionSettings:
    """How cycles are run.

    Attributes:
        prefill_chunk: the most tokens that one forward of a drafter reads.
        window: the most output positions of a row that a cycle may look at.
        guard: told of every forward of a model other than the target.
        prefix_cache: what requests have read is kept for others.
        fresh_times: models are timed anew, whatever an earlier process has kept.
        fingerprint: of what texts depend on.
        output_store_tokens: of earlier outputs, that are kept to be quoted.
        faults: around what no request may depend on.
    """

    prefill_chunk: int
    window: int
    guard: HangGuard
    fresh_times: bool = False
    prefix_cache: bool = True
    faults: FaultGuard = field(default_factory=FaultGuard)
    fingerprint: str = ""
    output_store_tokens: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class RuntimeParts:
    pool: ModelPool
    manager: StateManager
    profiler: PerformanceProfiler
    settings: ExecutionSettings
    clock: ForwardClock
    rows: DecodingRows
    states: ModelStates  # of the models that have run here

    @property
    def faults(self) -> FaultGuard:
        return self.settings.faults

    @property
    def sampler(self) -> Sampler:
        return self.rows.sampler

    def record_stage(
        self,
        stage: str,
        places: int,
        started_s: float,
        *,
        times: int = 1,
    ) -> None:
        """Tells the profiler the engine's own time in a stage that ends now; see its
        `record_stage`. For after the results have been waited for.

        `started_s`: of `time.perf_counter`.
        """
        ended_s = time.perf_counter()
        with self.faults.part("timing"):
            own_ms = self.clock.own_ms(started_s, ended_s)
            self.profiler.record_stage(stage, places, own_ms, times)
