"""SLOs-Serve's scenarios: lengths, rates and objectives are the published ones."""

import itertools
import random
from statistics import fmean, pstdev

import pytest

from research.bench.traces import Arrival
from research.sim.roofline import RooflineTime
from research.sim.scenarios import BURST_CV, SCENARIOS, Lengths, scenario_requests
from tests.specrouter.slo_machines import OPT_7B


@pytest.mark.parametrize(("mean", "std"), [(763, 424), (26, 47), (4693, 1442)])
def test_lengths_have_the_mean_and_the_deviation(mean: float, std: float) -> None:
    law, draws = Lengths(mean, std), random.Random(0)
    found = [law.draw(draws) for _ in range(40_000)]
    assert fmean(found) == pytest.approx(mean, rel=0.03)
    assert pstdev(found) == pytest.approx(std, rel=0.08)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_seed_gives_one_list_and_rates_only_stretch_it(name: str) -> None:
    slow, fast = (scenario_requests(SCENARIOS[name], OPT_7B, rate, 60, 3) for rate in (1.0, 4.0))
    assert scenario_requests(SCENARIOS[name], OPT_7B, 1.0, 60, 3) == slow
    assert len(fast) == len(slow)
    if SCENARIOS[name].kinds[0].rounds is None:
        assert [one.at_s for one in fast] == pytest.approx([one.at_s / 4.0 for one in slow])
        assert slow[-1].at_s == pytest.approx(59.0), "one request a second"
    assert {one.seed for one in slow} == set(range(3_000_000, 3_000_000 + len(slow)))


def test_objectives_are_those_of_table_3() -> None:
    found = {name: scenario_requests(s, OPT_7B, 1.0, 40, 0) for name, s in SCENARIOS.items()}
    wanted = {"ChatBot": (5.0, 100.0), "Coder": (5.0, 50.0), "Summarizer": (3.0, 100.0)}
    for name, (slowdown, tpot_ms) in wanted.items():
        for one in found[name]:
            assert one.ttft_ms == pytest.approx(slowdown * OPT_7B.ms(len(one.token_ids)))
            assert (one.objective_ms, one.judges_runs, one.stages) == (tpot_ms, True, ())
    for one in found["Reasoning"]:
        assert [stage.tpot_ms for stage in one.stages] == [50.0, 100.0]
        assert one.stages[0].until_tokens is not None
        assert one.objective_ms is None
    assert {one.objective_ms for one in found["ToolLLM"]} == {50.0, 100.0}
    assert {one.category for one in found["Mixed"]} == {"chat", "code", "summary"}


def test_a_tool_s_next_round_comes_when_the_one_before_is_due() -> None:
    times = RooflineTime(((0.1, 0.0, 10.0),))
    found = scenario_requests(SCENARIOS["ToolLLM"], times, 0.001, 1, 2)
    assert len(found) > 1
    for one, after in itertools.pairwise(found):
        assert one.ttft_ms is not None
        assert one.objective_ms is not None
        due_s = (one.ttft_ms + one.new_tokens * one.objective_ms) / 1000.0
        assert after.at_s == pytest.approx(one.at_s + due_s)
    assert [one.objective_ms for one in found] == [50.0] * (len(found) - 1) + [100.0]


def test_requests_fit_the_models_context() -> None:
    for name in ("ChatBot", "Coder", "Summarizer"):
        for one in scenario_requests(SCENARIOS[name], OPT_7B, 1.0, 500, 0):
            assert len(one.token_ids) + one.new_tokens <= 2048
            assert one.token_ids
            assert one.new_tokens >= 2


def test_coding_comes_in_bursts() -> None:
    def variation(name: str) -> float:
        times = [one.at_s for one in scenario_requests(SCENARIOS[name], OPT_7B, 1.0, 4000, 1)]
        gaps = [b - a for a, b in itertools.pairwise(times)]
        return pstdev(gaps) / fmean(gaps)

    assert variation("Coder") == pytest.approx(BURST_CV, rel=0.25)
    assert variation("ChatBot") == pytest.approx(1.0, rel=0.1)


def test_a_trace_brings_its_times_and_for_some_its_lengths() -> None:
    trace = [Arrival(2.0 * at, "chat", 100 + at, 20) for at in range(50)]
    trace[7] = Arrival(14.0, "chat", 5000, 20)  # longer than the models' context
    chat = scenario_requests(SCENARIOS["ChatBot"], OPT_7B, 0.5, 40, 0, trace)
    assert {one.new_tokens for one in chat} == {20}
    assert 5000 not in {len(one.token_ids) for one in chat}
    assert chat[-1].at_s == pytest.approx(39 / 0.5)
    summary = scenario_requests(SCENARIOS["Summarizer"], OPT_7B, 0.5, 40, 0, trace)
    assert len({one.new_tokens for one in summary}) > 10
    assert [one.at_s for one in summary] == pytest.approx([one.at_s for one in chat], abs=4.0)
