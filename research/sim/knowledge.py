"""What a simulated engine knows of its machine.

`Knowledge` is asked for a snapshot before each cycle and told of the cycle after it. `Known` knows
the machine's times and the texts' acceptances as they are, so there is nothing to learn: policies
are compared, and not how fast they learn. `Learned` knows the times, and learns the rest as the
engine does: with its profiler, by `learn_cycle`.
"""

import itertools
from typing import Protocol

from research.sim.machine import Machine
from research.sim.text import SimulatedTexts, gain_over_law, learned
from specrouter.cycle import CyclePlan, CycleResult
from specrouter.engine.view_builder import SNAPSHOT_CYCLES
from specrouter.profile.acceptance import JudgedTrees, TreeAcceptance
from specrouter.profile.learning import learn_cycle
from specrouter.profile.profiler import PerformanceProfiler
from specrouter.profile.snapshot import (
    Outcome,
    OutcomeKey,
    PerformanceSnapshot,
    TreeKey,
    load_of,
)
from specrouter.profile.time_regression import TimeRegression, TimeSample

_MODES = (False, True)  # of sampling
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # of the forwards that are profiled


class Knowledge(Protocol):
    is_learning: bool

    def snapshot(self) -> PerformanceSnapshot: ...

    def record_forward(self, model: str, tokens: int, attended: float, ms: float) -> None: ...

    def record_trees(self, key: TreeKey, trees: JudgedTrees) -> None: ...

    def learn(self, plan: CyclePlan, result: CycleResult, elapsed_ms: float) -> None: ...


class Known:
    """See the module."""

    is_learning = False

    def __init__(self, machine: Machine, texts: SimulatedTexts) -> None:
        self._snapshot = true_snapshot(machine, texts)

    def snapshot(self) -> PerformanceSnapshot:
        return self._snapshot

    def record_forward(self, model: str, tokens: int, attended: float, ms: float) -> None:
        pass

    def record_trees(self, key: TreeKey, trees: JudgedTrees) -> None:
        pass

    def learn(self, plan: CyclePlan, result: CycleResult, elapsed_ms: float) -> None:
        pass


class Learned:
    """See the module."""

    is_learning = True

    def __init__(self, machine: Machine) -> None:
        self._profiler = PerformanceProfiler(machine.parameters)
        for name, times in machine.times.items():
            samples = [TimeSample(size, 0.0, times.at(size)) for size in _SIZES]
            self._profiler.learn_curve(name, TimeRegression.profiled(samples))
        self._cycles = 0
        self._known = self._profiler.snapshot()

    def snapshot(self) -> PerformanceSnapshot:
        if self._cycles % SNAPSHOT_CYCLES == 0:
            self._known = self._profiler.snapshot()
        return self._known

    def record_forward(self, model: str, tokens: int, attended: float, ms: float) -> None:
        self._profiler.record_forward(model, tokens, attended, ms)

    def record_trees(self, key: TreeKey, trees: JudgedTrees) -> None:
        self._profiler.record_trees(key, trees)

    def learn(self, plan: CyclePlan, result: CycleResult, elapsed_ms: float) -> None:
        self._cycles += 1
        self._profiler.begin_cycle()
        learn_cycle(self._profiler, plan, result, elapsed_ms)


def true_snapshot(machine: Machine, texts: SimulatedTexts) -> PerformanceSnapshot:
    """What a profiler would know in the long run."""
    trees: dict[TreeKey, TreeAcceptance] = {}
    outcomes: dict[OutcomeKey, Outcome] = {}
    loads = {load_of(count) for count in range(1, machine.max_requests + 1)}
    for proposer, verifier in itertools.combinations(machine.names, 2):
        text = texts.of(proposer, verifier)
        for mode in _MODES:
            trees[(proposer,), verifier, mode] = learned(text)
            for load in loads if verifier == machine.target else ():
                outcomes[(proposer, verifier), load, mode] = Outcome(tokens=gain_over_law(text))
    return PerformanceSnapshot(
        machine.times,
        machine.parameters,
        trees=trees,
        stages=machine.stages,
        outcomes=outcomes,
        is_learning=False,
    )
