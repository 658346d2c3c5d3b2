"""What is known beforehand helps, and a search is repeatable."""

from dataclasses import replace

import numpy as np
import pytest

from research.figures.cell import machine_of
from research.studies.admitted import MACHINE, ask
from research.studies.clairvoyant import Plan, Problem, climb
from research.studies.fidelity import Kept, kept, overrun, table
from research.studies.frozen_drafts import freeze
from specrouter.bench.replay import Answer, LoadRequest, Outcome

_TOKENS = 32
_LLAMA = machine_of("adaserve-llama70b")


def _problem(objectives_ms: list[float], known: bool = False, alpha: float = 0.65) -> Problem:
    """Requests that come together, with prompts of 300 tokens."""
    requests = [
        LoadRequest(0.0, "any", (0,) * 300, _TOKENS, 1.0, place, ms)
        for place, ms in enumerate(objectives_ms)
    ]
    drafts = freeze(len(requests), _TOKENS, alpha, seed=0, known=known)
    return Problem(_LLAMA, requests, drafts, first_token_s=10.0)


def _plan(count: int) -> Plan:
    return Plan((False,) * count, (0.0,) * count)


def test_who_decodes_alone_without_drafts_takes_a_pass_a_token() -> None:
    problem = _problem([1000.0])
    none = replace(problem.drafts, nodes=problem.drafts.nodes + 4000)
    ran = replace(problem, drafts=none).run(_plan(1))
    times = _LLAMA.times
    prompt_ms = times["llama-3.1-70b"].at(300) + times["llama-3.2-1b"].at(300)
    wanted_ms = prompt_ms + (_TOKENS - 1) * times["llama-3.1-70b"].at(1)
    assert 1000.0 * ran.end_s == pytest.approx(wanted_ms)
    assert 1000.0 * ran.first_s[0] == pytest.approx(prompt_ms)
    assert ran.attained.all()


def test_drafts_follow_the_law_and_only_accepted_nodes_are_verified_when_known() -> None:
    known, unknown = (freeze(100, _TOKENS, 0.65, 0, each) for each in (True, False))
    assert (known.accepted.max(axis=2) >= unknown.accepted.max(axis=2)).all()
    assert np.array_equal(known.nodes, known.accepted)
    assert (unknown.nodes >= unknown.accepted).all()
    assert unknown.accepted.mean() == pytest.approx(unknown.promised.mean(), rel=0.05)
    assert not unknown.accepted[:, :, 0].any()


def test_it_is_no_slower_to_know_the_drafts() -> None:
    known, unknown = (_problem([30.0] * 12, each).run(_plan(12)) for each in (True, False))
    assert known.end_s < unknown.end_s


def test_who_sits_out_misses_and_makes_room() -> None:
    problem = _problem([20.0] * 24)
    assert not problem.run(_plan(24)).attained.all()
    some = replace(_plan(24), out=(False,) * 2 + (True,) * 22)
    ran = problem.run(some)
    assert ran.attained.tolist() == [True] * 2 + [False] * 22
    assert np.isfinite(ran.end_s)


def test_a_first_token_that_comes_too_late_is_a_miss() -> None:
    problem = replace(_problem([1000.0]), first_token_s=0.5)
    assert not problem.run(replace(_plan(1), waits_s=(1.0,))).attained.any()


@pytest.mark.slow
def test_the_search_is_repeatable_and_finds_what_no_plan_does_not() -> None:
    problem = _problem([20.0] * 24)
    plan, ran = climb(problem, 120, seed=1)
    again, _ = climb(problem, 120, seed=1)
    assert plan == again
    assert ran.attained.sum() > problem.run(_plan(24)).attained.sum()


def test_who_was_declined_was_not_admitted_as_attainable() -> None:
    """Twelve prompts, each of which may wait for four others."""
    machine = machine_of(MACHINE)
    ttft_ms = 5.0 * machine.batch_times.ms(1000)
    requests = [
        LoadRequest(
            0.0, "chat", (0,) * 1000, 20, 1.0, seed, 100.0, ttft_ms=ttft_ms, judges_runs=True
        )
        for seed in range(12)
    ]
    found = ask(machine, "slos-serve", requests)
    assert found.requests == 12
    assert 0 < found.admitted <= 5
    assert found.attained == found.admitted - found.missed


def _outcome(ttft_ms: float, tpot_ms: float, error: str | None = None) -> Outcome:
    """Asked for 100 ms and 20 ms."""
    asked = LoadRequest(0.0, "any", (1,), 8, 0.0, 0, objective_ms=20.0, ttft_ms=100.0)
    return Outcome(asked, 0.0, Answer(ttft_ms, tpot_ms, 8, error=error))


def test_only_what_was_admitted_with_ample_slack_is_held_to_it() -> None:
    found = [_outcome(90, 19), _outcome(105, 19), _outcome(90, 30), _outcome(200, 40, "lost")]
    assert [overrun(one) for one in found] == pytest.approx([0.95, 1.05, 1.5, 2.0])
    assert kept([0.2, 0.3, 0.5, None], found) == Kept(admitted=3, missed=2, far=1, ended=3)
    assert kept([0.19, None, 0.2, 0.0], found) == Kept(admitted=1, missed=1, far=1, ended=3)


def test_the_table_has_medians_of_rounds_and_sums_of_what_was_admitted() -> None:
    def line(live: float, simulated: float) -> dict[str, object]:
        slack = {"admitted": 10, "missed": 2, "far": 1}
        row = {"live": {"attainment": live}, "simulated": {"attainment": simulated}, "slack": slack}
        return {"load": 1.5, "policies": {"slo": row}}

    shown = table([line(0.5, 0.6), line(0.3, 0.6), line(0.4, 0.9)]).splitlines()
    assert shown[1].split() == ["1.50", "slo", "40.0%", "60.0%", "50/60", "30/60", "40/90"]
    assert shown[2].strip() == "with ample slack 30, missed 6, by over 10% 3"
