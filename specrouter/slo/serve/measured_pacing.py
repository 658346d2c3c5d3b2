"""The policy `slo`, with the times and acceptances that an engine measures as it runs.

Requests are paced as the planner decodes them: with the drafts of the chain in use for requests
that leave it open. If that is the target alone, as beside a large batch of requests without
objectives, the planner still drafts for those in need. Then they are paced with the chain that it
would take, if that is faster for a single request.

Pure except for a cache: the same snapshot and load give the same pacing.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from modelpool.attention.backend import READING_QUERIES
from specrouter.config import EngineConfig
from specrouter.cycle import CONTEXT_STEP
from specrouter.profile.batch_time import CurveTime
from specrouter.profile.cycle_times import Workload, curve_of, drafting_ms, model_ms, stage_ms
from specrouter.profile.prediction import acceptance_rate
from specrouter.profile.snapshot import PerformanceSnapshot, load_of, outcome_of
from specrouter.profile.time_curve import PAIRS
from specrouter.request.params import Chain
from specrouter.slo.admission import AdmissionPolicy, Admit
from specrouter.slo.serve.amortized import Amortized
from specrouter.slo.serve.policy import MOST_ERROR, by_objectives
from specrouter.slo.serve.requests import has_objective
from specrouter.view import SCHEDULED, EngineView


def measured_pacing(
    target: str, prefill_chunk: int, most_tokens: int
) -> Callable[[EngineView], Amortized]:
    """Return the pacing by view.

    Args:
        target: name of the target.
        prefill_chunk: prompt tokens that a cycle reads at most.
        most_tokens: tokens of a batch at most.
    """

    @lru_cache(maxsize=16)
    def pacing(
        snapshot: PerformanceSnapshot, chain: Chain, load: tuple[int, int, bool]
    ) -> Amortized:
        requests, slots, sampled = load
        work = Workload(requests=requests, slots=slots, sampled=sampled)

        def drafting(drafters: Chain, alpha: float) -> Amortized:
            times = batch_times(snapshot, (*drafters, target), work, most_tokens)
            idle_ms = times.ms(prefill_chunk)
            return Amortized(times, idle_ms, alpha, chunk=prefill_chunk)

        alone = drafting((), 0.0)
        if len(chain) == 1:
            return alone
        alpha = min(acceptance_rate(chain[:-1], target, snapshot, work.sampled), 0.99)
        found = drafting(chain[:-1], alpha)
        return found if found.fastest_ms < alone.fastest_ms else alone

    return lambda view: pacing(view.performance, _chain(view, target), _load(view))


class _Slo(AdmissionPolicy):
    preempts = True

    def for_engine(self, engine: EngineConfig, target: str) -> Admit:
        chunk = engine.prefill_chunk
        pacing = measured_pacing(target, chunk, engine.most_batch_tokens)
        return by_objectives(pacing, chunk, most_error=MOST_ERROR)


SLO = _Slo()


def batch_times(
    snapshot: PerformanceSnapshot, chain: Chain, work: Workload, most_tokens: int
) -> CurveTime:
    """Return the times of batches that draft with a chain, on the machine as it is now."""
    name, batch = chain[-1], np.array([work.requests])
    target = curve_of(snapshot, name, name)
    factor = snapshot.machine * outcome_of(snapshot, chain, work.requests, work.sampled).time
    read = READING_QUERIES * work.requests * work.slots
    around_ms = target.slope_ms_per_million * PAIRS * read
    around_ms += float(
        stage_ms(snapshot, "verify", batch)[0] + stage_ms(snapshot, "cycle", batch)[0]
    )
    # An intermediate is assumed to verify as often as the first model drafts.
    step_ms = sum(float(model_ms(snapshot, each, name, work, batch)[0]) for each in chain[:-1])
    if len(chain) > 1:
        step_ms += float(stage_ms(snapshot, "draft", batch)[0])
        around_ms += drafting_ms(snapshot, work.requests)
    return CurveTime(
        target.scaled(factor), factor * step_ms, factor * around_ms, float(work.slots), most_tokens
    )


def _chain(view: EngineView, target: str) -> Chain:
    """Return the chain in use for requests that leave it open.

    If that drafts nothing, it is the best chain that could draft at once.
    """
    in_use = view.standing.in_use.get(SCHEDULED)
    if in_use is None:
        return (target,)
    decision = in_use.decision
    for chain in (decision.chain, *(option.chain for option in decision.alternatives)):
        if len(chain) > 1 and view.available.issuperset(chain) and view.loaded.issuperset(chain):
            return chain
    return (target,)


def _load(view: EngineView) -> tuple[int, int, bool]:
    """Return the number of decoding requests with objectives, their mean slots, and their mode.

    The number is rounded up to a power of 2; the mode is that of most. Other requests are not
    counted: they sit out if there is no room.
    """
    running = view.running
    paced = running.take((running.unread == 0) & has_objective(running) & ~running.declined)
    count = max(1, len(paced))
    quanta = max(1, round(int(paced.slots.sum()) / count / CONTEXT_STEP))
    return load_of(count), quanta * CONTEXT_STEP, 2 * int(paced.sampled.sum()) >= count
