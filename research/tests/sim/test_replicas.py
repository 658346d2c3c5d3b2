"""Replicas in simulated time: turns, and hand-over by attainability."""

import pytest

from research.sim.machine import MACHINES, load_machine
from research.sim.replicas import Replicas
from research.sim.scenarios import SCENARIOS, scenario_requests
from research.sim.service import SimulatedService
from specrouter.bench.replay import LoadRequest, ReplayOutcome, replay
from specrouter.config import TreesConfig
from specrouter.view import EngineView
from tests.load_requests import load_request
from tests.specrouter.slo_machines import OPT_7B

FILE = MACHINES / "slos-serve-opt-6.7b.yaml"


def make() -> SimulatedService:
    return SimulatedService(machine=load_machine(FILE), acceptance=0.7, trees=TreesConfig())


def run(policy: str, count: int, requests: list[LoadRequest]) -> list[ReplayOutcome]:
    service = Replicas(make, count)
    service.use(policy)
    return replay(requests, service, service)


def apart(policy: str, requests: list[LoadRequest]) -> list[ReplayOutcome]:
    alone = make()
    alone.use(policy)
    return replay(requests, alone, alone)


def coder(rate: float, count: int = 80) -> list[LoadRequest]:
    return scenario_requests(SCENARIOS["Coder"], OPT_7B, rate, count, 5)


def attained(outcomes: list[ReplayOutcome]) -> int:
    return sum(one.is_attained is True for one in outcomes)


@pytest.mark.slow
def test_one_replica_is_the_service_itself() -> None:
    assert run("slo", 1, coder(3.0)) == apart("slo", coder(3.0))


def test_without_objectives_in_admission_replicas_take_turns() -> None:
    requests = coder(2.0, 20)
    found = run("vllm", 2, requests)
    for turn in (0, 1):
        alone = apart("vllm", requests[turn::2])
        assert [one.answer for one in found[turn::2]] == [one.answer for one in alone]


def test_who_is_not_attainable_at_one_replica_is_handed_to_the_next() -> None:
    """Turns would give all long prompts to one of the two."""
    prompts = [(1800, 60)[at % 2] for at in range(10)]
    requests = [
        load_request(
            category="code",
            token_ids=(0,) * prompt,
            new_tokens=20,
            seed=at,
            objective_ms=50.0,
            ttft_ms=450.0,
        )
        for at, prompt in enumerate(prompts)
    ]
    found = run("slos-serve", 2, requests)
    in_turn = sum(attained(apart("slos-serve", requests[turn::2])) for turn in (0, 1))
    assert attained(found) >= in_turn + 2
    assert all(one.answer.tokens == 20 for one in found)


def test_more_replicas_attain_more_of_a_burst() -> None:
    burst = coder(30.0, 40)
    one, two, four = (attained(run("slos-serve", count, burst)) for count in (1, 2, 4))
    assert 0 < one < two < four


@pytest.mark.parametrize(
    ("can", "turn", "taker", "is_declined"),
    [
        ((False, False, True, True), 0, 2, False),
        ((False, False, True, True), 3, 3, False),
        ((True, False), 1, 0, False),
        ((False, False, False), 1, 1, True),
    ],
)
def test_the_first_from_its_turn_on_that_can_takes_a_request_or_else_the_first_at_best_effort(
    can: tuple[bool, ...], turn: int, taker: int, is_declined: bool
) -> None:
    class Replica(SimulatedService):
        def admits(self, view: EngineView, name: int) -> bool:
            assert view.waiting.id.tolist() == [name]
            return can[service._replicas.index(self)]

    def made() -> SimulatedService:
        return Replica(machine=load_machine(FILE), acceptance=0.7, trees=TreesConfig())

    service = Replicas(made, len(can))
    service.use("slo")
    service._turn = turn
    sent = service.send(coder(1.0, 1)[0])
    assert sent in service._replicas[taker].waiting
    assert sent.is_declined == is_declined
