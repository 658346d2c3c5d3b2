"""The digest of policies in simulated time: what is compared, and that it is reproducible."""

from __future__ import annotations

from research.replay import digest
from research.replay.simulation import load_machines, simulate
from research.replay.stretches import load_stretches


def test_a_few_requests_come_out_the_same_twice_and_otherwise_with_another_seed() -> None:
    machine, stretch = load_machines()["llama-70b"], load_stretches()[0][:12]
    once, again, other = (simulate(machine, 0.75, stretch, "slo", seed) for seed in (0, 0, 1))
    assert once == again
    assert once != other


def test_the_runs_that_are_compared_are_stored() -> None:
    stored = digest.stored()
    assert set(stored) == set(digest.runs())
    assert all(one is not None for one in stored.values())
    name = "llama-70b stretch 1 target-only"
    assert digest.figures_of(name) == (name, stored[name])
