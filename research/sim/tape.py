"""Tape: what a run of the engine's step saw, decided and took, cycle by cycle, for replays.

`recording` writes one of a step that runs, live or simulated. From a tape follow `Conditions`: how
the run differed from its machine's curves and its drafter's acceptance. `ReplayingExecutor`
simulates under a part of these, so that the effect of each is told apart.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np

from research.sim.executor import Floats, Ints, SimulatedExecutor
from research.sim.machine import Machine
from research.sim.text import LEAST, MOST
from specrouter.cycle import CyclePlan, CycleResult
from specrouter.engine.step import DecodingStep
from specrouter.request.running import RunningRequest
from specrouter.request.spec import RequestSpec
from specrouter.slo.admission import Admission
from specrouter.view import EngineView

ARRIVALS, ACCEPTANCE, PASSES, SPEED, WORK = PARTS = (
    "arrivals",
    "acceptance",
    "times of passes",
    "speed of the second",
    "own work",
)
_WINDOW_S = 1.0  # over which a machine's speed is taken
_IDLE_S = 0.005  # a longer time between two cycles is nobody's work
_MOST_RATE = 0.99  # of acceptance
_FITS = 7  # simulations by which an acceptance is found
_PRIOR_TRIALS = 2.0  # of a request's acceptance, at that of all


@dataclass(frozen=True)
class TapedForward:
    """`times` forwards over `tokens` that took `ms` each; `attended`: see `TimeCurve`."""

    model: str
    tokens: int
    attended: float
    ms: float
    times: int


@dataclass(kw_only=True)
class TapedCycle:
    """Attributes:
    view, admission: by which requests were given rows; None: the policies rested.
    seeds: of the requests that run, by row.
    plan, result: None where nothing ran.
    """

    began_s: float
    ended_s: float = 0.0
    view: EngineView | None = None
    admission: Admission | None = None
    plan: CyclePlan | None = None
    result: CycleResult | None = None
    seeds: Mapping[int, int | None] = field(default_factory=dict)
    forwards: list[TapedForward] = field(default_factory=list)

    @property
    def forwards_ms(self) -> float:
        return sum(one.ms * one.times for one in self.forwards)


@contextmanager
def recording(
    step: DecodingStep, reports: tuple[Any, str], clock: Callable[[], float]
) -> Iterator[list[TapedCycle]]:
    """Every cycle that begins within, the one that runs last.

    Args:
        reports: an object, and its attribute that is told of every forward.
    """
    cycles: list[TapedCycle] = []
    executor: Any = step._executor
    run, execute, admission = step.run, executor.run, step.planning.admission
    told, name = reports
    tell = getattr(told, name)

    def taped_run() -> None:
        cycles.append(TapedCycle(began_s=clock()))
        run()
        cycles[-1].ended_s = clock()

    def taped_admission(cycle: int, waiting: Any, running: Collection[int]) -> Admission | None:
        found = admission(cycle, waiting, running)
        if found is not None and step.planning._decided is not None and cycles:
            cycles[-1].view, cycles[-1].admission = step.planning._decided.view, found
        return found

    def taped_execute(plan: CyclePlan) -> CycleResult:
        result: CycleResult = execute(plan)
        if cycles:
            running: Mapping[int, RunningRequest] = step._book.running
            cycles[-1].seeds = {row: one.spec.seed for row, one in running.items()}
            cycles[-1].plan, cycles[-1].result = plan, result
        return result

    def taped_forward(
        model: str, tokens: int, attended: float, elapsed_ms: float, times: int = 1
    ) -> None:
        tell(model, tokens, attended, elapsed_ms, times)
        if cycles:
            cycles[-1].forwards.append(TapedForward(model, tokens, attended, elapsed_ms, times))

    with (
        patch.object(step, "run", taped_run),
        patch.object(step.planning, "admission", taped_admission),
        patch.object(executor, "run", taped_execute),
        patch.object(told, name, taped_forward),
    ):
        yield cycles


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Of one run, beside a machine.

    Attributes:
        passes: time taken over the curve's, by model and by the binary logarithm of the tokens.
        second_s, speed: [T] from the run's begin, and what forwards took then over what `passes`
            leaves to be expected.
        work_ms: a cycle's time beside its forwards, by whether somebody drafts, and the logarithm
            of the rows.
        easier: by seed of the request, by how much its drafts were accepted more often than those
            of all, in logits.
        commit_tokens: in the mean, where somebody drafted.
    """

    passes: Mapping[tuple[str, int], float]
    second_s: Floats
    speed: Floats
    work_ms: Mapping[tuple[bool, int], float]
    easier: Mapping[int, float]
    commit_tokens: float

    @classmethod
    def of(cls, cycles: Sequence[TapedCycle], machine: Machine, began_s: float) -> "Conditions":
        ran = [one for one in cycles if one.plan is not None and one.forwards]
        passes = _ratios(ran, machine)
        second_s, speed = _speed(ran, machine, passes, began_s)
        return cls(
            passes=passes,
            second_s=second_s,
            speed=speed,
            work_ms=_work(cycles),
            easier=_easier(ran),
            commit_tokens=_commit_tokens(ran),
        )


def fitted_acceptance(commit_tokens: float, simulated: Callable[[float], float]) -> float:
    """The acceptance under which `simulated` commits so many tokens at once, in the mean."""
    low, high = LEAST, MOST
    for _ in range(_FITS):
        middle = (low + high) / 2
        low, high = (middle, high) if simulated(middle) < commit_tokens else (low, middle)
    return (low + high) / 2


def _logit(rate: float) -> float:
    return math.log(rate / (1.0 - rate))


def _size(count: float) -> int:
    return int(np.log2(max(count, 1.0)))


def _expected_ms(one: TapedForward, machine: Machine) -> float | None:
    times = machine.times.get(one.model)
    return None if times is None else float(times.at(one.tokens, one.attended)) * one.times


def _ratios(cycles: Sequence[TapedCycle], machine: Machine) -> dict[tuple[str, int], float]:
    took: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for one in (each for cycle in cycles for each in cycle.forwards):
        expected_ms = _expected_ms(one, machine)
        if expected_ms is not None:
            sums = took[one.model, _size(one.tokens)]
            sums[0] += one.ms * one.times
            sums[1] += expected_ms
    return {key: live / expected for key, (live, expected) in took.items() if expected}


def _speed(
    cycles: Sequence[TapedCycle],
    machine: Machine,
    passes: Mapping[tuple[str, int], float],
    began_s: float,
) -> tuple[Floats, Floats]:
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for cycle in cycles:
        of_second = sums[int((cycle.began_s - began_s) / _WINDOW_S)]
        for one in cycle.forwards:
            expected_ms = _expected_ms(one, machine)
            if expected_ms is not None:
                of_second[0] += one.ms * one.times
                of_second[1] += expected_ms * passes[one.model, _size(one.tokens)]
    known = [(second, live / due) for second, (live, due) in sorted(sums.items()) if due]
    seconds, factors = np.array(known, dtype=np.float64).reshape(-1, 2).T
    return (seconds + 0.5) * _WINDOW_S, factors


def _is_drafting(plan: CyclePlan) -> bool:
    return any(len(group.chain) > 1 for group in plan.groups)


def _work(cycles: Sequence[TapedCycle]) -> dict[tuple[bool, int], float]:
    found: dict[tuple[bool, int], list[float]] = defaultdict(list)
    for cycle, after in pairwise(cycles):
        if cycle.plan is not None and cycle.forwards:
            until_s = min(after.began_s, cycle.ended_s + _IDLE_S)
            key = _is_drafting(cycle.plan), _size(len(cycle.plan.rows))
            found[key].append((until_s - cycle.began_s) * 1000 - cycle.forwards_ms)
    return {key: float(np.mean(each)) for key, each in found.items()}


def _commits(cycles: Sequence[TapedCycle]) -> Iterator[tuple[int, int, int]]:
    """Seed of the request, tokens beyond the target's own, and the most that there could be."""
    for cycle in cycles:
        if cycle.plan is None or cycle.result is None:
            continue
        depths = {
            row: group.shape.depth for group in cycle.plan.groups for row in group.rows.tolist()
        }
        for commit in cycle.result.commits:
            seed = cycle.seeds.get(commit.row)
            if commit.drafted and seed is not None:
                yield seed, len(commit.tokens) - 1, min(depths.get(commit.row, 0), commit.drafted)


def _commit_tokens(cycles: Sequence[TapedCycle]) -> float:
    return float(np.mean([1 + accepted for _, accepted, _ in _commits(cycles)] or [1]))


def _easier(cycles: Sequence[TapedCycle]) -> dict[int, float]:
    """By the levels that were reached: how many were accepted."""
    accepted: dict[int, int] = defaultdict(int)
    tried: dict[int, int] = defaultdict(int)
    for seed, tokens, most in _commits(cycles):
        accepted[seed] += tokens
        tried[seed] += tokens + (tokens < most)
    mean = (1 + sum(accepted.values())) / (2 + sum(tried.values()))
    rates = {
        seed: (accepted[seed] + _PRIOR_TRIALS * mean) / (trials + _PRIOR_TRIALS)
        for seed, trials in tried.items()
    }
    return {seed: _logit(min(rate, _MOST_RATE)) - _logit(mean) for seed, rate in rates.items()}


@dataclass(eq=False, kw_only=True)
class ReplayingExecutor(SimulatedExecutor):
    """`parts` of `PARTS` are as in a run: all but `ARRIVALS`, which are the client's.

    Seeds of requests may be those of the run plus a multiple of `seed_period`.
    """

    conditions: Conditions
    parts: Collection[str]
    seed_period: int
    _seeds: dict[int, int] = field(default_factory=dict)

    def open(self, row: int, request: RequestSpec) -> None:
        self._seeds[row] = (request.seed or 0) % self.seed_period

    def _rates(self, rows: Ints) -> Floats | None:
        if ACCEPTANCE not in self.parts:
            return None
        easier = [
            self.conditions.easier.get(self._seeds.get(row, -1), 0.0) for row in rows.tolist()
        ]
        rates = 1.0 / (1.0 + np.exp(-_logit(self.texts.acceptance) - np.array(easier)))
        return np.clip(rates, LEAST, MOST)

    def _forward_ms(self, model: str, tokens: int, attended: float) -> float:
        ms, lived = super()._forward_ms(model, tokens, attended), self.conditions
        if PASSES in self.parts:
            ms *= lived.passes.get((model, _size(tokens)), 1.0)
        if SPEED in self.parts and len(lived.second_s):
            ms *= float(np.interp(self.clock.now_s, lived.second_s, lived.speed))
        return ms

    def _work(self, stage: str, places: int, times: int = 1) -> None:
        if WORK not in self.parts:
            super()._work(stage, places, times)

    def _rest_ms(self, plan: CyclePlan) -> float:
        if WORK not in self.parts:
            return 0.0
        known, size = self.conditions.work_ms, _size(len(plan.rows))
        drafts = _is_drafting(plan)
        near = [key for key in known if key[0] == drafts] or list(known)
        if not near:
            return 0.0
        return known[min(near, key=lambda key: abs(key[1] - size))]
