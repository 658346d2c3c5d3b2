"""What a simulated engine knows of its machine: a profiler, as the engine has one.

`Known` knows the machine's times and the texts' acceptances as they are, so there is nothing to
learn: policies are compared, and not how fast they learn. `learned_times` knows the times, and
learns the rest as the engine does.
"""

import itertools

from research.sim.machine import Machine
from research.sim.text import SimulatedTexts, gain_over_law, learned
from specrouter.profile.acceptance import TreeAcceptance
from specrouter.profile.profiler import PerformanceProfiler
from specrouter.profile.snapshot import (
    ChainOutcome,
    OutcomeKey,
    PerformanceSnapshot,
    TreeKey,
    load_of,
)
from specrouter.profile.time_regression import TimeRegression, TimeSample

_MODES = (False, True)  # of sampling
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # of the forwards that are profiled


class Known(PerformanceProfiler):
    """See the module."""

    def __init__(self, machine: Machine, texts: SimulatedTexts) -> None:
        super().__init__(parameters=machine.parameters)
        self.is_learning = False
        self._true = true_snapshot(machine, texts)

    def snapshot(self) -> PerformanceSnapshot:
        return self._true

    def record_forward(
        self, model: str, tokens: int, attended: float, elapsed_ms: float, times: int = 1
    ) -> None:
        pass

    def record_cycle(
        self, elapsed_ms: float, committed: int, requests: int, stage: str | None = None
    ) -> None:
        pass


def learned_times(machine: Machine) -> PerformanceProfiler:
    """Of a profiler that knows the machine's times, and has seen no text."""
    profiler = PerformanceProfiler(parameters=machine.parameters)
    for name, times in machine.times.items():
        samples = [TimeSample(size, 0.0, times.at(size)) for size in _SIZES]
        profiler.learn_curve(name, TimeRegression.profiled(samples))
    return profiler


def true_snapshot(machine: Machine, texts: SimulatedTexts) -> PerformanceSnapshot:
    """What a profiler would know in the long run."""
    trees: dict[TreeKey, TreeAcceptance] = {}
    outcomes: dict[OutcomeKey, ChainOutcome] = {}
    loads = {load_of(count) for count in range(1, machine.max_requests + 1)}
    for proposer, verifier in itertools.combinations(machine.names, 2):
        text = texts.of(proposer, verifier)
        for mode in _MODES:
            trees[(proposer,), verifier, mode] = learned(text)
            for load in loads if verifier == machine.target else ():
                outcomes[(proposer, verifier), load, mode] = ChainOutcome(
                    tokens=gain_over_law(text)
                )
    return PerformanceSnapshot(
        times=machine.times,
        parameters=machine.parameters,
        trees=trees,
        stages=machine.stages,
        outcomes=outcomes,
        is_learning=False,
    )
