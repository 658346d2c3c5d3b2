"""What the policies promise, in virtual execution with exact times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from research.policies.autoregressive import Autoregressive
from research.policies.slos_serve import slos_serve
from research.policies.strict_pacing import StrictDecision
from specrouter.profile.batch_time import BatchTime
from specrouter.request.objective import Stage
from specrouter.slo.admission import Admit, fcfs
from specrouter.slo.serve.pacing import Pacing
from specrouter.slo.serve.policy import by_objectives
from tests.specrouter.slo.serve.virtual_execution import Job, VirtualEngine
from tests.specrouter.slo.test_admission import needs, request, view
from tests.specrouter.slo_machines import OPT_7B

TIERS = (50.0, 100.0)
PLAIN = Autoregressive(OPT_7B, idle_ms=100.0)

MakePolicy = Callable[[Pacing], Admit]


def ours(pacing: Pacing, patience_ms: float = 30_000.0) -> Admit:
    return by_objectives(lambda view: pacing, 256, patience_ms=patience_ms, make=StrictDecision)


def published(pacing: Pacing) -> Admit:
    return slos_serve(lambda view: pacing, 256)


def arrivals(
    count: int, per_s: float, seed: int, output: float = 40.0, staged: float = 0.0
) -> list[Job]:
    """Poisson; prompts and outputs log-normal; TTFT 3 or 5 times that of an idle machine, TPOT 50
    or 100 ms, of some requests one after the other."""
    draws = np.random.default_rng(seed)
    jobs, now_ms = [], 0.0
    for number in range(count):
        now_ms += float(draws.exponential(1000.0 / per_s))
        prompt = int(np.clip(draws.lognormal(6.3, 0.6), 8, 2000))
        length = int(np.clip(draws.lognormal(np.log(output), 0.6), 1, 400))
        ttft_ms = float(draws.choice([3.0, 5.0])) * OPT_7B.ms(prompt)
        tpot_ms: float | None = float(draws.choice(TIERS))
        stages: tuple[Stage, ...] = ()
        if draws.random() < staged:
            thinking = Stage(50.0, until_tokens=max(1, length // 2))
            stages, tpot_ms = (thinking, Stage(100.0)), None
        jobs.append(
            Job(
                id=number,
                arrived_ms=now_ms,
                prompt=prompt,
                output=length,
                ttft_ms=ttft_ms,
                tpot_ms=tpot_ms,
                stages=stages,
            )
        )
    return jobs


def late(jobs: Sequence[Job], tolerance: float = 1e-6) -> list[Job]:
    """Of those that were admitted as requests that attain their objectives."""
    kept = [job for job in jobs if job.was_admitted]
    return [job for job in kept if max(job.late_stages(), default=0.0) > 1.0 + tolerance]


def attained(jobs: Sequence[Job]) -> float:
    return float(np.mean([max(job.late_stages(), default=0.0) <= 1.0 + 1e-6 for job in jobs]))


def run(policy: Admit, jobs: list[Job], times: BatchTime = OPT_7B, **engine: Any) -> None:
    VirtualEngine(policy=policy, times=times, **engine).run(jobs)
    assert all(job.is_done for job in jobs)


@pytest.mark.parametrize("per_s", [6.0, 14.0])
@pytest.mark.parametrize("make", [published, ours])
def test_nobody_who_is_admitted_misses_a_stage(make: MakePolicy, per_s: float) -> None:
    """TTFT, every stage's TPOT, and every run of ten tokens."""
    jobs = arrivals(300, per_s, seed=1, staged=0.3)
    run(make(PLAIN), jobs)
    assert late(jobs) == []
    windows = [each for job in jobs if job.was_admitted for each in job.late_windows()]
    assert max(windows) <= 1.0 + 1e-6
    assert 0.5 < attained(jobs) <= 1.0


@pytest.mark.parametrize("make", [published, ours])
def test_memory_binds_and_best_effort_requests_give_theirs_up(make: MakePolicy) -> None:
    jobs = arrivals(200, 10.0, seed=3)
    for job in jobs[::3]:
        job.ttft_ms = job.tpot_ms = None
    run(make(PLAIN), jobs, kv_tokens=12_000, rows=12)
    assert late(jobs) == []
    assert sum(job.preemptions for job in jobs) > 5
    preempted = [job for job in jobs if job.preemptions]
    assert any(len(job.came_ms) == job.output for job in preempted), "and keep their tokens"
    assert not any(job.was_admitted and job.preemptions and job.ttft_ms for job in jobs[1::3])


def test_objectives_of_one_kind_only_decide_too() -> None:
    """TTFT only, TPOT only, end-to-end only, and none."""
    jobs = arrivals(240, 7.0, seed=5)
    for place, job in enumerate(jobs):
        if place % 4 == 0:
            job.tpot_ms = None
        elif place % 4 == 1:
            job.ttft_ms = None
        elif place % 4 == 2:
            job.ttft_ms = job.tpot_ms = None
            job.e2e_ms = 3.0 * (OPT_7B.ms(job.prompt) + job.output * OPT_7B.ms(1))
        else:
            job.ttft_ms = job.tpot_ms = None
    run(ours(PLAIN), jobs)
    assert late(jobs) == []
    assert attained([job for job in jobs if job.e2e_ms]) > 0.5


def overload(count: int, seed: int) -> list[Job]:
    """Twice what the machine can serve, and one request in twenty without an objective."""
    jobs = arrivals(count, 25.0, seed)
    for job in jobs[::20]:
        job.ttft_ms = job.tpot_ms = None
    return jobs


def test_under_lasting_overload_no_best_effort_request_starves() -> None:
    """The bound that the module states, for the oldest, with what stands before it added up."""
    patience_ms, jobs = 2000.0, overload(250, seed=6)
    run(ours(PLAIN, patience_ms), jobs)
    free = [job for job in jobs if job.ttft_ms is None]
    chunk = OPT_7B.tokens_within(50.0) // 8
    life_ms = max(job.came_ms[-1] - job.arrived_ms for job in jobs if job.was_admitted)
    for job in free:
        behind = [other for other in jobs if other.arrived_ms <= job.arrived_ms]
        before = [
            other
            for other in behind
            if not other.was_admitted and other.came_ms[-1] > job.arrived_ms
        ]
        batches = sum(-(-other.prompt // chunk) + other.output for other in before) + 1
        own = -(-job.prompt // chunk) + job.output
        bound_ms = patience_ms + life_ms + 100.0 * (batches + own)
        assert job.came_ms[-1] - job.arrived_ms <= bound_ms


def test_nobody_is_admitted_before_a_promoted_request_has_its_row() -> None:
    asked = {"tpot_ms": 50.0, "ttft_ms": 2000.0}
    running = request(1, left=0, row=0, decoded=3, decode_ms=120.0, **asked)
    old = replace(request(2, left=50), arrived_s=-100.0)
    young = request(3, left=50, **asked)
    full = view([old, young], [running], free_rows=4, free_tokens=60)
    assert ours(PLAIN)(full).admitted == ()
    assert ours(PLAIN, 1e9)(full).admitted == () or 3 in ours(PLAIN, 1e9)(full).admitted
    roomy = view([old, young], [running], free_rows=4, free_tokens=200)
    assert ours(PLAIN)(roomy).admitted == (2, 3)
    assert ours(PLAIN)(roomy).chunks[2] >= OPT_7B.tokens_within(50.0) // 8


def test_the_youngest_best_effort_request_is_preempted_and_no_more_than_needed() -> None:
    asked = {"tpot_ms": 50.0, "ttft_ms": 2000.0}
    idle = [request(n, float(n), left=0, row=n, decoded=5, kv_tokens=100) for n in range(3)]
    new = request(9, 9.0, left=20, kv_tokens=150, **asked)
    found = ours(PLAIN)(view([new], idle, free_rows=0, free_tokens=0))
    assert found.admitted == (9,)
    assert found.preempted == (2, 1)
    enough = ours(PLAIN)(view([new], idle, free_rows=1, free_tokens=60))
    assert enough.preempted == (2,)
    assert ours(PLAIN)(view([new], idle, free_rows=1, free_tokens=150)).preempted == ()
    slo_only = [replace(each, tpot_ms=100.0, decode_ms=1.0) for each in idle]
    assert ours(PLAIN)(view([new], slo_only, free_rows=0, free_tokens=0)).admitted == ()


@given(needs, needs, st.integers(0, 6), st.none() | st.integers(0, 300), st.integers(1, 200))
def test_without_objectives_it_decides_as_fcfs(
    waiting: list[tuple[int, int]],
    running: list[tuple[int, int]],
    free_rows: int,
    free_tokens: int | None,
    chunk: int,
) -> None:
    queue = [request(n, key, left=left) for n, (key, left) in enumerate(waiting)]
    rows = [
        request(100 + n, key, left=left - 1, row=n, decoded=key)
        for n, (key, left) in enumerate(running)
    ]
    seen = view(queue, rows, free_rows, free_tokens)
    for make in (by_objectives, slos_serve):
        assert make(lambda view: PLAIN, chunk)(seen) == fcfs(chunk)(seen)


def test_who_cannot_be_on_time_any_more_is_declined() -> None:
    asked = {"tpot_ms": 50.0, "ttft_ms": 40.0}
    seen = view([request(1, left=1000, **asked), request(2, left=20, **asked)], [])
    assert ours(PLAIN)(seen).declined == (1,)
    many = [request(n, left=800, tpot_ms=50.0, ttft_ms=160.0) for n in range(4)]
    once, again = published(PLAIN)(view(many, [])), ours(PLAIN)(view(many, []))
    assert len(once.declined) == 3
    assert again.declined == (), "ours asks again"


def test_who_asks_for_a_tpot_does_not_wait_for_ever() -> None:
    """Nine rows' worth of others come first; then it is the oldest that waits."""
    running = [request(10 + each, row=each, left=0, tpot_ms=25.0) for each in range(8)]
    late = request(1, left=2000, tpot_ms=25.0, kv_tokens=2020)
    seen = view([late], running)
    assert ours(PLAIN)(replace(seen, now_s=1.0)).admitted == ()
    promoted = ours(PLAIN)(replace(seen, now_s=31.0))
    assert promoted.admitted == (1,)
    assert promoted.declined == ()
