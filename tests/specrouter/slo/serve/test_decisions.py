"""What holds of every decision: an engine can follow it, and nobody gets what there is not."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from research.policies.autoregressive import Autoregressive
from research.policies.slos_serve import slos_serve
from research.policies.strict_pacing import Strict, StrictDecision
from specrouter.engine.plan_check import PlanCheck
from specrouter.request.objective import Stage
from specrouter.slo.admission import Admission, Admit
from specrouter.slo.serve.measured_pacing import measured_pacing
from specrouter.slo.serve.policy import PacingOf, by_objectives
from specrouter.view import EngineView
from tests.specrouter.predictions import rising, snapshot
from tests.specrouter.slo.test_admission import request, view
from tests.specrouter.slo_machines import OPT_7B, amortized
from tests.specrouter.views import Entry, entries_of

PLAIN = Autoregressive(OPT_7B, idle_ms=100.0)
strictly = partial(by_objectives, make=StrictDecision)
DRAFTING = Strict(OPT_7B, 100.0, 0.7)
MEASURED = snapshot({"big": rising(20.0, 0.1)})
URGENT = {"tpot_ms": 500.0, "ttft_ms": 2000.0}


Drawn = Callable[[np.random.Generator], dict[str, Any]]


def usual(draws: np.random.Generator) -> dict[str, Any]:
    tpot_ms, ttft_ms = float(draws.choice([30.0, 200.0])), float(draws.choice([300.0, 5000.0]))
    return {"tpot_ms": tpot_ms, "ttft_ms": ttft_ms}


def odd(draws: np.random.Generator) -> dict[str, Any]:
    """Of any size that a positive number has, and of every kind."""

    def drawn(one_in: int) -> float | None:
        sizes = [5e-324, 1e-9, 1e-5, 60.0, 9000.0, 9e11, 1e12, 1e200, 1.7e308]
        return None if draws.integers(one_in) else float(draws.choice(sizes))

    tpot_ms, later_ms = drawn(2), drawn(4)
    asked: dict[str, Any] = {"tpot_ms": tpot_ms, "ttft_ms": drawn(2), "e2e_ms": drawn(3)}
    if tpot_ms is not None and later_ms is not None:
        asked["stages"] = (Stage(tpot_ms, until_tokens=9), Stage(later_ms))
    return asked


def drawn_view(draws: np.random.Generator, rows: int, drawn_objective: Drawn) -> EngineView:
    """Requests of all kinds, so old that some are promoted, and little memory."""

    def drawn(number: int, row: int | None) -> Entry:
        left = int(draws.integers(0, 60)) if draws.random() < 0.5 or row is None else 0
        one = request(number, float(number), left, row=row, kv_tokens=left + 20)
        one = replace(one, arrived_s=float(draws.choice([0.0, 39.0, 40.0])))
        if draws.random() < 0.5:
            one = replace(one, **drawn_objective(draws))
        if row is None or left:
            return replace(one, awaits_first=row is not None)
        return replace(one, decoded=3, decode_ms=float(draws.choice([60.0, 300.0])))

    running = [drawn(number, number) for number in range(int(draws.integers(0, rows + 1)))]
    waiting = [drawn(100 + number, None) for number in range(int(draws.integers(0, 8)))]
    seen = view(waiting, running, rows - len(running), int(draws.integers(0, 200)))
    return replace(seen, now_s=40.0, performance=MEASURED)


def check_decision(found: Admission, seen: EngineView, check: PlanCheck) -> None:
    """An engine can follow it: there are rows and memory for all who are admitted."""
    running, waiting = entries_of(seen.running), entries_of(seen.waiting)
    known = {one.id: one for one in (*waiting, *running)}
    check.check_admission(found, [each.id for each in waiting], known)
    came, gone = ([known[each] for each in ids] for ids in (found.admitted, found.preempted))
    assert len(came) - len(gone) <= seen.free_rows
    assert seen.kv_free_tokens is not None
    tokens = seen.kv_free_tokens + sum(one.kv_tokens for one in gone)
    assert sum(one.kv_tokens for one in came) <= tokens
    left = {one.id for one in running} - set(found.preempted)
    assert found.chunks.keys() <= left | set(found.admitted)


@pytest.mark.parametrize(("chunk", "rows"), [(1, 1), (8, 4), (16, 4), (64, 8), (256, 8)])
def test_an_engine_can_follow_every_decision(chunk: int, rows: int) -> None:
    """Not more prompt tokens than a cycle reads, and rows and memory for all who are admitted."""
    draws = np.random.default_rng(chunk)
    most = chunk + rows
    policy = by_objectives(measured_pacing("big", chunk, most), chunk)
    check = PlanCheck(("big",), "big", (), most)
    for _ in range(60):
        seen = drawn_view(draws, rows, usual)
        check_decision(policy(seen), seen, check)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("make", [by_objectives, strictly, slos_serve])
@pytest.mark.parametrize(
    "pacing_of",
    [
        lambda view: PLAIN,
        lambda view: DRAFTING,
        measured_pacing("big", 64, 72),
        amortized(OPT_7B, 100.0, 0.7, 64),
    ],
)
def test_whatever_size_objectives_are_of_an_engine_can_follow(
    make: Callable[..., Admit], pacing_of: PacingOf
) -> None:
    """And no sum of theirs is infinite, or no number."""
    draws = np.random.default_rng(5)
    policy, check = make(pacing_of, 64), PlanCheck(("big",), "big", (), 1 << 20)
    for _ in range(40):
        seen = drawn_view(draws, 8, odd)
        check_decision(policy(seen), seen, check)


def test_urgent_prompts_leave_a_promoted_one_its_part_of_a_cycle() -> None:
    """The oldest of them; together they are no more than a cycle reads."""
    chunk, rows = 256, 8
    old = [replace(request(n, left=400, row=n), arrived_s=n - 100.0) for n in range(4)]
    asked = {**URGENT, "ttft_ms": 400.0, "awaits_first": True}
    soon = [request(10 + n, left=250, row=4 + n, **asked) for n in range(3)]
    seen = replace(view([], [*old, *soon]), performance=MEASURED)
    policy = by_objectives(measured_pacing("big", chunk, chunk + rows), chunk)
    chunks = policy(seen).chunks
    assert sum(chunks.values()) <= chunk + rows
    assert chunks[old[0].id] >= chunk // 8
    assert sum(chunks.get(each.id, 0) for each in soon) >= chunk // 4


def test_who_has_lost_its_tpot_before_it_was_preempted_comes_back_without_it() -> None:
    """It would take rows from others for an objective that it misses whatever is done."""
    lost = request(1, left=40, tpot_ms=50.0)
    lost = replace(lost, decoded=10, decode_ms=50_000.0, remaining=9)
    idle = request(2, 9.0, left=0, row=0, decoded=5)
    found = strictly(lambda view: PLAIN, 256)(view([lost], [idle], free_rows=0))
    assert (found.preempted, found.admitted) == ((), ())
    assert found.declined == (1,)


@pytest.mark.parametrize(
    ("asked", "is_over"),
    [
        ({"tpot_ms": 100.0}, True),  # for 30 s it could not be attained
        ({"stages": (Stage(100.0),)}, True),
        ({"tpot_ms": 100.0, "ttft_ms": 31_500.0}, False),  # it may still come in time
        ({"tpot_ms": 100.0, "ttft_ms": 30_500.0}, True),
        ({"tpot_ms": 1.0}, True),
    ],
)
@pytest.mark.parametrize("rejects", [False, True])
def test_who_waited_too_long_is_rejected_if_it_asked_for_that_and_else_promoted(
    asked: dict[str, Any], is_over: bool, rejects: bool
) -> None:
    """Nobody loses a row for a request that ends."""
    old = request(1, left=20, rejects=rejects, **asked)
    idle = replace(request(2, 5.0, left=0, row=0, decoded=5), arrived_s=30.0)
    seen = replace(view([old], [idle], free_rows=0), now_s=31.0)
    found = strictly(lambda view: PLAIN, 256)(seen)
    ends = rejects and is_over
    assert (found.admitted, found.preempted) == (((), ()) if ends else ((1,), (2,)))
    assert (1 in found.declined) or not ends


def test_who_asks_to_be_rejected_waits_until_patience_ends() -> None:
    asked = request(1, left=20, rejects=True, tpot_ms=100.0)
    busy = [request(2 + row, left=0, row=row, decoded=5, **URGENT) for row in range(2)]
    for now_s, declined in ((29.0, ()), (31.0, (1,))):
        seen = replace(view([asked], busy, free_rows=0), now_s=now_s)
        assert strictly(lambda view: PLAIN, 256)(seen).declined == declined
