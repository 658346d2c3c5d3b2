"""The objects that all parts of the execution share, with the drafters."""

from collections.abc import Callable
from dataclasses import dataclass, field

from modelpool import ModelPool
from processors import Sampler
from specrouter.execution.decoding_rows import DecodingRows
from specrouter.execution.drafter import Drafter, create_drafters
from specrouter.execution.forward_clock import ForwardClock
from specrouter.execution.model_states import ModelStates
from specrouter.execution.model_times import ModelTimes
from specrouter.execution.runtime_parts import ExecutionSettings, RuntimeParts
from specrouter.profile.profiler import PerformanceProfiler
from statemgr import StateManager


@dataclass(frozen=True, eq=False, kw_only=True)
class Runtime(RuntimeParts):
    drafters: dict[str, Drafter] = field(default_factory=dict)  # by name

    @classmethod
    def create(
        cls,
        pool: ModelPool,
        manager: StateManager,
        profiler: PerformanceProfiler,
        settings: ExecutionSettings,
    ) -> "Runtime":
        faults = settings.faults
        clock = ForwardClock(profiler.record_forward)
        window, make_sampler = settings.window, sampler_for(pool)
        rows = DecodingRows(manager, pool.vocab_size, pool.eos_token_ids, window, make_sampler)
        times = ModelTimes(pool, profiler, settings.fresh_times)
        states = ModelStates(pool, manager, times, clock, settings.guard, faults)
        runtime = cls(
            pool=pool,
            manager=manager,
            profiler=profiler,
            settings=settings,
            clock=clock,
            rows=rows,
            states=states,
        )
        runtime.drafters.update(create_drafters(runtime))
        read = {layer for one in runtime.drafters.values() for layer in one.hidden}
        states.hidden = tuple(sorted(read))
        return runtime


def sampler_for(pool: ModelPool) -> Callable[[int, int], Sampler]:
    """Return the sampler's class: the fused one if a member's attention backend has kernels."""
    if not any(pool.plan(name).attention.is_fused for name in pool.models):
        return Sampler
    from processors.fused_sampler import FusedSampler

    return FusedSampler
