"""Simulated time: what a cycle takes and brings, by the engine's own decisions."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrouter.bench.load_bench import LoadBench
from specrouter.bench.load_options import LoadOptions
from specrouter.bench.load_points import Point
from specrouter.bench.rounds import Progress
from specrouter.cli.main import main
from specrouter.config import TreesConfig
from specrouter.profile.time_curve import TimeCurve
from specrouter.sim.machine import Machine
from specrouter.sim.replay import LoadRequest, Outcome, replay
from specrouter.sim.service import SimulatedService
from specrouter.sim.text import LEAST, MOST, SimulatedText
from specrouter.sim.traces import poisson
from specrouter.slo.policies import BASELINES, POLICIES

STEP_MS, EACH_MS, DRAFT_MS = 20.0, 1.0, 0.5
CHUNK, ROWS = 32, 4
SIMULATED = [name for name in POLICIES if name != "static-tree"]


def service(
    acceptance: float = 0.7, rows: int = ROWS, draft_ms: float = DRAFT_MS
) -> SimulatedService:
    """A pass takes 20 ms, and 1 ms more for every token after the first."""
    times = {
        "small": TimeCurve(((1, draft_ms), (512, draft_ms))),
        "big": TimeCurve(((1, STEP_MS), (513, STEP_MS + 512 * EACH_MS))),
    }
    machine = Machine("small", "big", times, {"small": 1, "big": 100}, CHUNK, rows)
    return SimulatedService(machine, SimulatedText(acceptance), TreesConfig())


def request(
    at_s: float = 0.0,
    prompt: int = 8,
    tokens: int = 16,
    objective_ms: float | None = None,
    seed: int = 0,
) -> LoadRequest:
    return LoadRequest(at_s, "chat", (0,) * prompt, tokens, 1.0, seed, objective_ms)


def run(
    policy: str, requests: list[LoadRequest], acceptance: float = 0.7, **settings: Any
) -> list[Outcome]:
    simulated = service(acceptance, **settings)
    simulated.use(policy)
    return replay(requests, simulated, simulated)


# Drafts


@pytest.mark.parametrize("acceptance", [LEAST, 0.5, 0.7, MOST])
def test_best_tokens_are_accepted_as_often_as_is_asked_for(acceptance: float) -> None:
    draws = np.random.default_rng(1)
    drawn = SimulatedText(acceptance).draw(4000, 1, 1, draws)
    assert drawn.worth.mean() == pytest.approx(acceptance, abs=0.02)
    assert drawn.walk(drawn.worth > 0, draws).mean() == pytest.approx(acceptance, abs=0.03)


def test_nodes_are_accepted_as_often_as_they_say() -> None:
    draws = np.random.default_rng(2)
    drawn = SimulatedText(0.6).draw(4000, 3, 3, draws)
    accepted = drawn.walk(np.ones_like(drawn.worth, dtype=bool), draws)
    assert accepted.mean() == pytest.approx(drawn.worth.sum(axis=1).mean(), rel=0.03)
    assert accepted.max() == 3


def test_drawn_trees_are_trees_whose_worths_fall() -> None:
    drawn = SimulatedText(0.6).draw(50, 4, 3, np.random.default_rng(3))
    assert drawn.worth.shape == (50, 12)
    for row in range(50):
        for node in range(12):
            parent = drawn.parents[row, node]
            above = 1.0 if parent < 0 else drawn.worth[row, parent]
            assert drawn.worth[row, node] == pytest.approx(above * drawn.chances[row, node])
            depth = 0 if parent < 0 else drawn.depths[row, parent]
            assert drawn.depths[row, node] == depth + 1
        for parent in range(-1, 12):
            assert drawn.chances[row, drawn.parents[row] == parent].sum() <= 1.0 + 1e-9


def test_nothing_is_accepted_below_what_was_not_chosen() -> None:
    draws = np.random.default_rng(4)
    drawn = SimulatedText(0.9).draw(200, 3, 1, draws)
    without_root = np.ones_like(drawn.worth, dtype=bool)
    without_root[:, 0] = False
    assert drawn.walk(without_root, draws).max() == 0


# Time


def test_a_request_alone_on_the_target_takes_the_time_of_its_passes() -> None:
    [outcome] = run("target-only", [request(prompt=8)])
    assert outcome.answer.ttft_ms == pytest.approx(STEP_MS + 7 * EACH_MS)
    assert outcome.answer.tpot_ms == pytest.approx(STEP_MS)
    assert (outcome.answer.tokens, outcome.answer.acceptance_length) == (16, 1.0)


def test_a_long_prompt_is_read_in_chunks_beside_others() -> None:
    first, second = run("target-only", [request(tokens=40), request(0.1, prompt=3 * CHUNK)])
    chunks = 3 * (STEP_MS + CHUNK * EACH_MS)  # one row decodes beside each
    assert second.answer.ttft_ms == pytest.approx(chunks, abs=STEP_MS)
    assert first.answer.tpot_ms is not None
    assert first.answer.tpot_ms > STEP_MS


def test_who_finds_no_row_waits_for_one() -> None:
    many = [request(seed=seed) for seed in range(ROWS + 1)]
    times = [outcome.answer.ttft_ms or 0.0 for outcome in run("target-only", many)]
    assert max(times[:ROWS]) < 100.0 < times[ROWS]


def test_drafts_that_are_accepted_save_passes() -> None:
    [alone] = run("target-only", [request(tokens=200)])
    [greedy] = run("global-greedy", [request(tokens=200)], 0.9)
    assert greedy.answer.acceptance_length is not None
    assert greedy.answer.acceptance_length > 2.0
    assert (greedy.answer.tpot_ms or 0.0) < 0.7 * (alone.answer.tpot_ms or 0.0)


def test_drafts_that_cost_too_much_are_not_made() -> None:
    [outcome] = run("goodput", [request(tokens=50)], LEAST, draft_ms=50.0)
    assert outcome.answer.acceptance_length == 1.0


@pytest.mark.parametrize("policy", SIMULATED)
def test_every_policy_serves_every_request_and_the_same_seeds_give_the_same(policy: str) -> None:
    load = [request(at / 20, 8 + at, 24, (None, 25.0, 60.0)[at % 3], seed=at) for at in range(12)]
    found = run(policy, load)
    assert [outcome.answer.tokens for outcome in found] == [24] * 12
    assert all(outcome.answer.error is None for outcome in found)
    assert run(policy, load) == found


def test_goodput_serves_more_objectives_than_selection_without_them() -> None:
    """Sixty requests of AdaServe's mix, at two rates; the objectives are its ratios."""
    attained = {"global-greedy": 0, "goodput": 0}
    for rate in (8.0, 12.0):
        arrivals = poisson(rate, 60, 30.0, seed=1)
        load = [
            request(
                arrival.at_s,
                max(1, arrival.input_tokens // 8),
                48,
                (arrival.slo_ratio or 1.0) * STEP_MS,
                seed,
            )
            for seed, arrival in enumerate(arrivals)
        ]
        for policy in attained:
            found = run(policy, load, rows=64)
            attained[policy] += sum(outcome.is_attained is True for outcome in found)
    assert 30 < attained["global-greedy"] < 90, "at rates that are worth a look"
    assert attained["goodput"] > 1.1 * attained["global-greedy"]


# The command


def test_what_does_not_end_in_time_is_cancelled() -> None:
    simulated = service()
    [outcome] = replay([request(tokens=100)], simulated, simulated, drain_s=0.5)
    assert outcome.answer.error == "cancelled"
    assert 0 < outcome.answer.tokens < 100


def test_the_bench_runs_on_a_simulation_and_its_clock() -> None:
    names = ("target-only", "goodput")
    options = LoadOptions(Path("x.yaml"), poisson=4.0, simulate=0.7, policy=names, requests=10)
    simulated = service()
    bench = LoadBench(
        simulated, lambda text: list(text.encode()), {"a": ["abc"]}, options,
        Progress(io.StringIO()), simulated,
    )  # fmt: skip
    [found] = bench.run([Point(1.0, 0.6, 1.0, tuple(poisson(4.0, 10, 30.0, 0)))])["points"]
    assert bench.baseline_ms == pytest.approx(STEP_MS)
    assert set(found["policies"]) == set(names)


def test_a_policy_that_cannot_be_simulated_is_refused_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "static-tree" in BASELINES
    asked = ["bench", "load", "--poisson", "1", "--simulate", "0.7", "--policy", "static-tree"]
    assert main(asked) == 2
    assert "--policy: static-tree cannot be simulated" in capsys.readouterr().err


@pytest.mark.parametrize("acceptance", ["0", "0.34", "0.96", "nan", "-1"])
def test_an_acceptance_that_no_text_has_is_refused(
    acceptance: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "load", "--poisson", "1", "--simulate", acceptance]) == 2
    assert "--simulate: must be from 0.35 to 0.95" in capsys.readouterr().err


def test_a_server_is_not_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["bench", "load", "--poisson", "1", "--simulate", "0.7", "--server", "http://x"]
    assert main(asked) == 2
    assert "--simulate: not with --server" in capsys.readouterr().err


def test_the_command_simulates_with_the_measured_times_of_a_pool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    asked = ["bench", "load", "--config", "tiny", "--poisson", "20", "--requests", "12"]
    asked += ["--policy", "target-only", "goodput", "--simulate", "0.7", "--json", str(file)]
    assert main(asked) == 0
    assert "SIMULATED, a best token accepted in 0.70 of cases" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["conditions"]["simulated_acceptance"] == 0.7
    assert found["points"][0]["policies"]["goodput"]["errors"] == 0
