"""The objects that drafters and all other parts of the execution share."""

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
    """Settings of the execution.

    Attributes:
        prefill_chunk: the most tokens that one forward of a drafter reads.
        window: the most output positions of a row that a cycle uses.
        guard: watches every forward of a model other than the target.
        fresh_times: models are timed anew, without the times of earlier processes.
        prefix_cache: tokens that requests have read are kept for others.
        faults: catches failures of work that no request may depend on.
        fingerprint: see `specrouter.engine.fingerprint`.
        output_store_tokens: most tokens of earlier outputs that are kept for text drafters.
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
        """Record the engine's own time in a stage that ends now, without forwards.

        It is called after the stage has waited for its results. `started_s`: its start by
        `time.perf_counter`; for the others see `PerformanceProfiler.record_stage`.
        """
        ended_s = time.perf_counter()
        with self.faults.part("timing"):
            own_ms = self.clock.own_ms(started_s, ended_s)
            self.profiler.record_stage(stage, places, own_ms, times)
