"""Replicas in simulated time: turns, and hand-over by attainability."""

import pytest

from research.sim.machine import MACHINES, load_machine
from research.sim.replicas import Replicas
from research.sim.scenarios import SCENARIOS, scenario_requests
from research.sim.service import SimulatedService
from specrouter.bench.replay import LoadRequest, Outcome, replay
from specrouter.config import TreesConfig
from tests.load_requests import load_request
from tests.specrouter.slo_machines import OPT_7B

FILE = MACHINES / "slos-serve-opt-6.7b.yaml"


def make() -> SimulatedService:
    return SimulatedService(machine=load_machine(FILE), acceptance=0.7, trees=TreesConfig())


def run(
    policy: str, count: int, requests: list[LoadRequest], hands_over: bool = True
) -> tuple[list[Outcome], Replicas]:
    service = Replicas(make, count, hands_over)
    service.use(policy)
    return replay(requests, service, service), service


def coder(rate: float, count: int = 80) -> list[LoadRequest]:
    return scenario_requests(SCENARIOS["Coder"], OPT_7B, rate, count, 5)


def attained(outcomes: list[Outcome]) -> int:
    return sum(one.is_attained is True for one in outcomes)


@pytest.mark.slow
def test_one_replica_is_the_service_itself() -> None:
    alone = make()
    alone.use("slo")
    assert run("slo", 1, coder(3.0))[0] == replay(coder(3.0), alone, alone)


def test_without_objectives_in_admission_replicas_take_turns() -> None:
    requests = coder(2.0, 20)
    found, service = run("vllm", 2, requests)
    assert service.handed_over == 0
    for turn in (0, 1):
        alone = make()
        alone.use("vllm")
        apart = replay(requests[turn::2], alone, alone)
        ours = [one.answer.tokens for one in found[turn::2]]
        assert ours == [one.answer.tokens for one in apart]


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
    found, service = run("slos-serve", 2, requests)
    kept, _ = run("slos-serve", 2, requests, hands_over=False)
    assert service.handed_over > 0
    assert attained(found) >= attained(kept) + 2
    assert all(one.answer.tokens == 20 for one in found)
