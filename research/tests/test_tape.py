"""A tape tells what made a run differ from its simulation, each thing by its name; and admission,
asked again for a taped view, decides as it did."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from statistics import mean

import pytest

from research.figures.cell import machine_of
from research.sim.executor import SimulatedExecutor
from research.sim.machine import Machine
from research.sim.service import SimulatedService
from research.sim.tape import (
    ACCEPTANCE,
    PASSES,
    WORK,
    Conditions,
    ReplayingExecutor,
    TapedCycle,
    fitted_acceptance,
    recording,
)
from specrouter.bench.replay import LoadRequest, ReplayOutcome, replay
from specrouter.config import TreesConfig
from specrouter.profile.time_curve import TimeCurve
from tests.load_requests import load_request

_SEEDS = 1_000


def _requests() -> list[LoadRequest]:
    return [
        load_request(
            at_s=0.2 * number,
            token_ids=(0,) * 200,
            new_tokens=40,
            seed=number,
            objective_ms=60.0,
            ttft_ms=2_000.0,
        )
        for number in range(24)
    ]


def _taped(
    machine: Machine,
    acceptance: float,
    executor: Callable[..., SimulatedExecutor] = SimulatedExecutor,
) -> tuple[list[TapedCycle], list[ReplayOutcome]]:
    service = SimulatedService(
        machine=machine, acceptance=acceptance, trees=TreesConfig(), executor=executor
    )
    service.use("slo")
    reports = service._profiler, "record_forward"
    with recording(service._step, reports, service._clock) as cycles:
        outcomes = replay(_requests(), service, service)
    admits = service._policies.admits
    assert cycles
    assert all(admits(one.view) == one.admission for one in cycles if one.view is not None)
    return cycles, outcomes


def _replayed(
    machine: Machine, acceptance: float, conditions: Conditions, parts: Collection[str]
) -> tuple[list[TapedCycle], list[ReplayOutcome]]:
    executor = partial(ReplayingExecutor, conditions=conditions, parts=parts, seed_period=_SEEDS)
    return _taped(machine, acceptance, executor)


@pytest.fixture
def machine() -> Machine:
    return machine_of("adaserve-llama70b")


def _ends_s(outcomes: list[ReplayOutcome]) -> list[float]:
    return [one.end_s for one in outcomes]


def test_a_slower_machine_is_told_by_the_times_of_its_passes(machine: Machine) -> None:
    cycles, lived = _taped(machine.slowed(1.5), 0.75)
    told = Conditions.of(cycles, machine, 0.0)
    assert list(told.passes.values()) == pytest.approx([1.5] * len(told.passes))
    assert told.speed == pytest.approx(1.0)
    _, without = _replayed(machine, 0.75, told, ())
    _, with_times = _replayed(machine, 0.75, told, (PASSES,))
    assert mean(_ends_s(without)) < mean(_ends_s(with_times)) - 0.05
    assert mean(_ends_s(with_times)) == pytest.approx(mean(_ends_s(lived)), rel=0.05)


@pytest.mark.long
def test_texts_that_are_harder_to_draft_are_told_by_their_acceptance(machine: Machine) -> None:
    lived = Conditions.of(_taped(machine, 0.5)[0], machine, 0.0)

    def simulated(acceptance: float) -> float:
        found, _ = _replayed(machine, acceptance, lived, (ACCEPTANCE,))
        return Conditions.of(found, machine, 0.0).commit_tokens

    assert fitted_acceptance(lived.commit_tokens, simulated) == pytest.approx(0.5, abs=0.06)


def test_an_engine_that_works_beside_its_passes_is_told_by_that_work(machine: Machine) -> None:
    slow = replace(
        machine, stages={"cycle": TimeCurve(((1.0, 20.0),)), "drafting": TimeCurve(((1.0, 20.0),))}
    )
    cycles, lived = _taped(slow, 0.75)
    told = Conditions.of(cycles, machine, 0.0)
    assert list(told.work_ms.values()) == pytest.approx([20.0] * len(told.work_ms))
    _, found = _replayed(machine, 0.75, told, (WORK,))
    assert mean(_ends_s(found)) == pytest.approx(mean(_ends_s(lived)), rel=0.05)
