"""MeasuredPacing: the pacing of a machine whose times and acceptances are measured as it runs.

Requests are paced as the planner decodes them: with the drafts of the chain that is in use for
those that leave it open, or one token at a time where that is the target alone.

Pure but for what it remembers: the same view gives the same pacing. It is made anew when the
snapshot of the measurements is, or the load differs: a bound of the work per cycle.
"""

import numpy as np

from specrouter.profile.batch_time import BatchTime, Chunked, CurveTime
from specrouter.profile.cycle_times import Workload, curve_of, drafting_ms, model_ms, stage_ms
from specrouter.profile.prediction import acceptance_rate
from specrouter.profile.snapshot import PerformanceSnapshot, load_of, outcome_of
from specrouter.profile.time_curve import PAIRS, TimeCurve
from specrouter.request.params import Chain
from specrouter.slo.serve.pacing import Autoregressive, Pacing, Speculative
from specrouter.view import SCHEDULED, EngineView
from statemgr.row_groups import KV_QUANTUM, READING_QUERIES

# Of every TPOT, kept for what a mean number of accepted tokens does not hold.
_MARGIN = 0.1
_Key = tuple[Chain, int, int, bool]  # chain, requests, slots, sampled


class MeasuredPacing:
    """Args:
    prefill_chunk: prompt tokens of a batch while nobody decodes who has an objective.
    most_tokens: of a batch.
    """

    def __init__(self, target: str, prefill_chunk: int, most_tokens: int) -> None:
        self._target = target
        self._chunk = prefill_chunk
        self._most = most_tokens
        self._snapshot: PerformanceSnapshot | None = None
        self._made: dict[_Key, Pacing] = {}

    def __call__(self, view: EngineView) -> Pacing:
        if view.performance is not self._snapshot:
            self._snapshot, self._made = view.performance, {}
        key = self._key(view)
        if key not in self._made:
            self._made[key] = self._pacing(view.performance, *key)
        return self._made[key]

    def _key(self, view: EngineView) -> _Key:
        chain = view.standing.chain(SCHEDULED) or (self._target,)
        if not view.available.issuperset(chain):
            chain = (self._target,)
        decoding = [one for one in view.running if not one.prompt_left]
        slots = sum(one.slots for one in decoding) / max(1, len(decoding))
        quanta = max(1, round(slots / KV_QUANTUM))
        sampled = 2 * sum(one.sampled for one in decoding) >= len(decoding)
        return chain, load_of(max(1, len(decoding))), quanta * KV_QUANTUM, sampled

    def _pacing(
        self, snapshot: PerformanceSnapshot, chain: Chain, requests: int, slots: int, sampled: bool
    ) -> Pacing:
        work = Workload(requests, slots, sampled=sampled)
        times = self._times(snapshot, chain, work)
        idle_ms = times.ms(self._chunk)
        if len(chain) == 1:
            return Autoregressive(times, idle_ms)
        alpha = acceptance_rate(chain[:-1], self._target, snapshot, sampled)
        return Speculative(times, min(alpha, 0.99), idle_ms, margin=_MARGIN)

    def _times(self, snapshot: PerformanceSnapshot, chain: Chain, work: Workload) -> BatchTime:
        batch = np.array([work.requests])
        target = curve_of(snapshot, self._target, self._target)
        assert isinstance(target, TimeCurve), "measured times are curves"
        outcome = outcome_of(snapshot, chain, work.requests, work.sampled)
        factor = snapshot.machine * outcome.time
        around_ms = float(
            (stage_ms(snapshot, "verify", batch) + stage_ms(snapshot, "cycle", batch))[0]
        )
        around_ms += (
            target.slope_ms_per_million * PAIRS * READING_QUERIES * work.requests * work.slots
        )
        step_ms = 0.0
        for name in chain[:-1]:  # an intermediate judges as often as the first model drafts
            step_ms += float(model_ms(snapshot, name, self._target, work, batch)[0])
        if len(chain) > 1:
            step_ms += float(stage_ms(snapshot, "draft", batch)[0])
            around_ms += drafting_ms(snapshot, work.requests)
        return Chunked(
            CurveTime(
                target.scaled(factor), factor * step_ms, factor * around_ms, float(work.slots)
            ),
            self._most,
        )
