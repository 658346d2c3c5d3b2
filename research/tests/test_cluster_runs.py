"""What a run of requests is, and when a refused caller was told the truth."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from research.studies import cluster_runs
from research.studies.cluster_load import Site
from research.studies.cluster_runs import (
    Alone,
    Asked,
    Run,
    Served,
    kept_pace,
    load,
    requests_of,
    retries,
    within_2,
)
from specrouter.cluster.dispatcher import state_ages
from specrouter.request.objective import Objective, Stage
from specrouter.request.output import RequestMetrics
from tests.specrouter.cluster.links import Cluster

OUTPUT: Any = None  # of no account here


def served(sent_s: float, prompt: int, told_s: float | None = None) -> Served:
    return Served(Asked(sent_s, (300,) * prompt, 8, 0), sent_s, OUTPUT, told_s)


def test_the_true_wait_ends_when_a_prompt_no_shorter_is_taken() -> None:
    found = retries(
        [served(1.0, 50, told_s=2.0), served(2.0, 10), served(4.5, 60), served(5.0, 50)]
    )
    assert found == [(2.0, 3.5)]
    assert within_2(found) == 1.0


def test_a_refusal_after_which_none_was_taken_is_not_judged() -> None:
    found = retries([served(1.0, 50, told_s=2.0), served(0.5, 60), served(4.5, 10)])
    assert found == []


def test_a_wait_below_a_second_cannot_be_told() -> None:
    found = retries([served(1.0, 50, told_s=1.0), served(1.1, 50), served(1.2, 50, told_s=3.0)])
    assert found == [(1.0, 1.0)]


def test_the_share_of_states_is_of_those_at_most_so_old() -> None:
    ages = state_ages()
    assert cluster_runs._share_within(ages, 0.6) == 1.0
    for age_s in (0.05, 0.1, 0.35, 0.6, 0.7, 9.0):
        ages.observe(age_s)
    assert cluster_runs._share_within(ages, 0.6) == 4 / 6


def test_lengths_are_cut_and_a_seed_gives_one_list() -> None:
    run = Run(policy="slo", load=1.0, count=50, seed=3)
    asked = requests_of(None, run)
    assert asked == requests_of(None, run)
    assert max(len(one.prompt) for one in asked) == 700
    assert max(one.tokens for one in asked) == 256
    assert asked[-1].at_s == pytest.approx(49.0)


def test_load_is_times_what_the_replicas_would_serve_one_at_a_time() -> None:
    """Twice the time for everything, half the rate; and objectives are of the fast one."""
    fast, slow = Alone(0.1, 10.0, (10.0, 16.0)), Alone(0.2, 20.0, (20.0, 32.0))
    arguments: Any = SimpleNamespace(traces=None)
    one, two = (Site(OUTPUT, arguments, (fast, each)) for each in (fast, slow))
    run = Run(policy="slo", load=0.5, count=20, seed=0)
    assert one.rate(run) * 0.75 == pytest.approx(two.rate(run))
    assert fast.rate([Asked(0.0, (300,) * 500, 95, 0)]) == pytest.approx(1.0)
    assert fast.objective(Asked(0.0, (300,) * 100, 8, 0)) == pytest.approx((250.0, 50.0))


def test_figures_are_of_the_run_and_its_replicas(
    small_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may take for ever attains its objective; whoever may take no time is refused."""
    for name, each in (("_PROMPT", 20), ("_OUTPUT", 3), ("_VOCABULARY", (5, 200))):
        monkeypatch.setattr(cluster_runs, name, each)
    run = Run(policy="round-robin", load=1.0, count=4, seed=0)
    asked = [Asked(0.0, one.prompt, one.tokens, one.seed) for one in requests_of(None, run)]
    patient = {"silence_s": 30.0}
    rejects = Run(policy="slo", load=1.0, count=4, seed=0, rejects=True)
    with Cluster(small_config, resume=patient) as cluster:
        router = cluster.router
        found = asyncio.run(cluster_runs.alone(router, asked))
        easy = asyncio.run(load(router, asked, run, lambda _: (1e6, 1e6)))
        hard = asyncio.run(load(router, asked, rejects, lambda _: (1e-3, 1e-3)))
    assert found.keys() == {"a-0", "a-1"}
    assert all(one.tpot_ms > 0 < one.prefill_ms for one in found.values())
    assert (easy["requests"], easy["attained"], easy["refused"]) == (4, 1.0, 0)
    served_by = {name: each["requests"] for name, each in easy["replicas"].items()}
    assert served_by == {"a-0": 2, "a-1": 2}
    assert (hard["attained"], hard["refused"], hard["replicas"]) == (0.0, 4, {})


def metrics(tpot_ms: float | None, asked: Objective | None, *stages: bool) -> RequestMetrics:
    return RequestMetrics(
        ttft_ms=5.0,
        tpot_ms=tpot_ms,
        acceptance_length=2.0,
        cycles=4,
        chains={},
        prompt_tokens=3,
        output_tokens=8,
        objective=asked,
        attained_stages=stages,
    )


def test_a_pace_is_kept_whatever_became_of_the_first_token() -> None:
    asked = Objective(tpot_ms=20.0, ttft_ms=1.0)  # which 5 ms have missed
    assert kept_pace(metrics(19.0, asked)) is True
    assert kept_pace(metrics(20.0, asked)) is True
    assert kept_pace(metrics(21.0, asked)) is False
    assert kept_pace(metrics(None, asked)) is None
    assert kept_pace(metrics(19.0, None)) is None
    assert kept_pace(metrics(19.0, Objective(tpot_ms=None, ttft_ms=1.0))) is None
    staged = Objective(
        tpot_ms=None, ttft_ms=None, stages=(Stage(10.0, until_tokens=2), Stage(30.0))
    )
    assert kept_pace(metrics(19.0, staged, True, True)) is True
    assert kept_pace(metrics(19.0, staged, False, True)) is False
