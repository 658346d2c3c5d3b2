"""The policy `slo` by the times and acceptances that an engine measures as it runs.

Requests are paced as the planner decodes them: with the drafts of the chain that is in use for
those that leave it open. Where that is the target alone, the planner still drafts for those in
need, so they are paced with the chain that it would take, if that is faster for one of them. Else a
large batch of requests without objectives, for which drafts do not pay, would make objectives look
unattainable that are attained as soon as those sit out.

Pure but for what is remembered: the same snapshot and load give the same pacing.
"""

from dataclasses import replace

import numpy as np

from modelpool.attention.backend import READING_QUERIES
from specrouter.config import EngineConfig
from specrouter.profile.batch_time import CurveTime
from specrouter.profile.cycle_times import Workload, curve_of, drafting_ms, model_ms, stage_ms
from specrouter.profile.prediction import acceptance_rate
from specrouter.profile.snapshot import PerformanceSnapshot, load_of, outcome_of
from specrouter.profile.staircase import Staircase
from specrouter.profile.time_curve import PAIRS, TimeCurve
from specrouter.request.params import Chain
from specrouter.slo.admission import AdmissionPolicy, Admit
from specrouter.slo.serve.amortized import Amortized
from specrouter.slo.serve.pacing import Autoregressive, Pacing, Speculative
from specrouter.slo.serve.policy import PacingOf, by_objectives
from specrouter.slo.serve.requests import has_objective
from specrouter.view import LEAST_PACE_MARGIN, SCHEDULED, EngineView
from statemgr.arena import KV_QUANTUM


def measured_pacing(
    target: str, prefill_chunk: int, most_tokens: int, margin: float = LEAST_PACE_MARGIN
) -> PacingOf:
    """Args:
    prefill_chunk: prompt tokens of a batch while nobody decodes who has an objective.
    most_tokens: of a batch.
    margin: share of every TPOT that is kept where drafts are counted on, for what a mean number of
        accepted tokens does not hold.
    """
    known: list[PerformanceSnapshot] = []
    made: dict[tuple[Chain, int, int, bool], Pacing] = {}

    def pacing_of(view: EngineView) -> Pacing:
        if not known or known[0] is not view.performance:
            known[:] = [view.performance]
            made.clear()
        chain, (requests, slots, sampled) = _chain(view, target), _load(view)
        key = (chain, requests, slots, sampled)
        if key not in made:
            work = Workload(requests=requests, slots=slots, sampled=sampled)
            made[key] = pacing(view.performance, chain, work)
        return made[key]

    def pacing(snapshot: PerformanceSnapshot, chain: Chain, work: Workload) -> Pacing:
        times = batch_times(snapshot, (target,), work, most_tokens)
        alone = Autoregressive(times, times.ms(prefill_chunk))
        if len(chain) == 1:
            return alone
        times = batch_times(snapshot, chain, work, most_tokens)
        alpha = min(acceptance_rate(chain[:-1], target, snapshot, work.sampled), 0.99)
        drafting = Speculative(times, alpha, times.ms(prefill_chunk), margin=margin)
        return drafting if drafting.fastest_ms < alone.fastest_ms else alone

    return pacing_of


class _Slo(AdmissionPolicy):
    preempts = True

    def for_engine(self, engine: EngineConfig, target: str) -> Admit:
        chunk = engine.prefill_chunk
        pacing = measured_pacing(target, chunk, engine.most_batch_tokens)
        return by_objectives(amortized(pacing, chunk), chunk, never_behind=True)


SLO = _Slo()


def amortized(pacing_of: PacingOf, chunk: int) -> PacingOf:
    """The same, where a prompt's time may be made good later, with the margin of the view.

    Args: `chunk`: of prompts, in a cycle.
    """
    last: list[tuple[Pacing, Amortized]] = []

    def amortized_of(view: EngineView) -> Pacing:
        strict, margin = pacing_of(view), view.pace_margin
        if not last or last[0][0] is not strict or last[0][1].margin != margin:
            kept = replace(strict, margin=margin) if isinstance(strict, Speculative) else strict
            last[:] = [(strict, Amortized(kept, chunk, margin))]
        return last[0][1]

    return amortized_of


def batch_times(
    snapshot: PerformanceSnapshot, chain: Chain, work: Workload, most_tokens: int
) -> CurveTime:
    """Of batches beside which so many requests draft with a chain, on the machine as it is now."""
    name, batch = chain[-1], np.array([work.requests])
    target = curve_of(snapshot, name, name)
    assert isinstance(target, TimeCurve | Staircase), "measured times are curves"
    factor = snapshot.machine * outcome_of(snapshot, chain, work.requests, work.sampled).time
    read = READING_QUERIES * work.requests * work.slots
    around_ms = target.slope_ms_per_million * PAIRS * read
    around_ms += float(
        stage_ms(snapshot, "verify", batch)[0] + stage_ms(snapshot, "cycle", batch)[0]
    )
    # An intermediate judges about as often as the first model drafts.
    step_ms = sum(float(model_ms(snapshot, each, name, work, batch)[0]) for each in chain[:-1])
    if len(chain) > 1:
        step_ms += float(stage_ms(snapshot, "draft", batch)[0])
        around_ms += drafting_ms(snapshot, work.requests)
    return CurveTime(
        target.scaled(factor), factor * step_ms, factor * around_ms, float(work.slots), most_tokens
    )


def _chain(view: EngineView, target: str) -> Chain:
    """In use for requests that leave it open, or, where that drafts nothing, the best that could
    at once."""
    in_use = view.standing.in_use.get(SCHEDULED)
    if in_use is None:
        return (target,)
    decision = in_use.decision
    for chain in (decision.chain, *(option.chain for option in decision.alternatives)):
        if len(chain) > 1 and view.available.issuperset(chain) and view.loaded.issuperset(chain):
            return chain
    return (target,)


def _load(view: EngineView) -> tuple[int, int, bool]:
    """Decoding requests with objectives, to a power of 2, their slots in the mean, and whether most
    are sampled. The others sit out where there is no room for them."""
    paced = [
        one
        for one in view.running
        if not one.prompt_left and has_objective(one) and not one.declined
    ]
    count = max(1, len(paced))
    quanta = max(1, round(sum(one.slots for one in paced) / count / KV_QUANTUM))
    return load_of(count), quanta * KV_QUANTUM, 2 * sum(one.sampled for one in paced) >= count
