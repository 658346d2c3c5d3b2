"""Batches are planned with the times and the acceptances that the engine has measured."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specrouter.cycle import DraftShape, Option
from specrouter.profile.cycle_times import Workload, verification_ms
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.request.params import Chain
from specrouter.slo.serve.measured_pacing import batch_times, measured_pacing
from specrouter.view import SCHEDULED, ChainDecision, EngineView, InUse, Standing
from tests.specrouter.predictions import ALL, PAIR, TRIPLE, flat, rising, snapshot
from tests.specrouter.slo.test_admission import request
from tests.specrouter.views import engine_view, entries_of, table

TIMES = {"small": flat(1.0), "middle": flat(9.0), "big": rising(50.0, 0.5)}
KNOWN = snapshot(TIMES, {PAIR: 0.6, TRIPLE: 0.8})
ALONE = ("big",)


def view(
    decoding: int,
    chain: Chain | None = None,
    performance: PerformanceSnapshot = KNOWN,
    available: frozenset[str] = ALL,
) -> EngineView:
    running = tuple(
        request(number, row=number, left=0, tpot_ms=200.0) for number in range(decoding)
    )
    standing = Standing()
    if chain is not None:
        in_use = InUse(ChainDecision(chain=chain, shape=DraftShape(4)), decoding, 0, 1, 1)
        standing = Standing({SCHEDULED: in_use})
    return engine_view(
        running,
        cycle=1,
        now_s=10.0,
        free_rows=4,
        available=available,
        performance=performance,
        standing=standing,
    )


def test_without_drafts_batches_take_what_a_pass_of_the_target_takes() -> None:
    pacing = measured_pacing("big", 64, 96)(view(4))
    assert not pacing.alpha
    assert pacing.times.ms(20) == 50.0 + 0.5 * 19
    assert pacing.idle_ms == pacing.times.ms(64)


def test_what_is_planned_is_what_the_scheduler_predicts_of_the_targets_pass() -> None:
    known = snapshot(TIMES, stages={"verify": rising(1.0, 0.1), "cycle": rising(2.0, 0.2)})
    work = Workload(requests=8, slots=256)
    [expected] = verification_ms(known, work, "big", np.array([8]))
    assert batch_times(known, ALONE, work, 96).ms(8) == pytest.approx(float(expected))


@pytest.mark.parametrize(("chain", "alpha", "step_ms"), [(PAIR, 0.6, 1.0), (TRIPLE, 0.8, 10.0)])
def test_with_drafts_batches_count_on_what_is_accepted_of_the_chain_in_use(
    chain: Chain, alpha: float, step_ms: float
) -> None:
    pacing = measured_pacing("big", 64, 96)(view(4, chain))
    assert pacing.alpha
    assert pacing.alpha == pytest.approx(alpha, abs=1e-6)
    assert pacing.times.ms(20, 3) - pacing.times.ms(20) == pytest.approx(3 * step_ms)


def test_a_chain_that_rests_is_not_counted_on() -> None:
    seen = view(4, PAIR, available=ALL - {"small"})
    assert not measured_pacing("big", 64, 96)(seen).alpha


def beside_the_target(accepted: float, **others: Any) -> EngineView:
    """The target alone is in use, and the scheduler has looked at the pair too."""
    known = snapshot(TIMES, {PAIR: accepted})
    seen = view(4, ALONE, known, **others)
    decision = ChainDecision(chain=ALONE, shape=DraftShape(4), alternatives=(Option(chain=PAIR),))
    return replace(seen, standing=Standing({SCHEDULED: InUse(decision, 4, 0, 1, 1)}))


def test_a_chain_that_would_draft_for_those_in_need_is_counted_on() -> None:
    """Where a large batch has made the scheduler decide on the target alone."""
    pacing = measured_pacing("big", 64, 96)(beside_the_target(0.6))
    assert pacing.alpha
    assert pacing.fastest_ms < 50.0
    unloaded = beside_the_target(0.6, available=ALL - {"small"})
    assert not measured_pacing("big", 64, 96)(unloaded).alpha


def test_a_chain_that_would_help_nobody_is_not_counted_on() -> None:
    slow = snapshot({**TIMES, "small": flat(60.0)}, {PAIR: 0.3})
    seen = replace(beside_the_target(0.3), performance=slow)
    assert not measured_pacing("big", 64, 96)(seen).alpha


def test_who_may_sit_out_does_not_make_batches_large() -> None:
    """Requests without objectives, or that were declined."""
    seen = view(2, PAIR)
    free = tuple(request(10 + number, row=2 + number, left=0) for number in range(40))
    running = entries_of(seen.running)
    declined = [replace(one, id=100 + one.id, declined=True) for one in running]
    crowded = replace(seen, running=table([*running, *free, *declined]))
    pacing_of = measured_pacing("big", 64, 96)
    assert pacing_of(crowded) is pacing_of(seen)


def test_no_batch_has_more_tokens_than_a_cycle_reads() -> None:
    times = measured_pacing("big", 64, 96)(view(4)).times
    assert times.tokens_within(1e6) == 96
    assert times.ms(96 * 2 + 10) == 2 * times.ms(96) + times.ms(10), "they are read in several"
    assert times.tokens_within(times.ms(20)) == 20
