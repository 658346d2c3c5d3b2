"""Which idle drafter is evaluated next, and on which row.

A shadow evaluation (`ShadowEvaluator`) costs a forward of the drafter over what it has missed, so
all of them together may take at most `EXPLORED_SHARE` of the time of the last minutes. Half of that
is spent while nothing happens; the rest is kept for when the drafter in use is accepted less than
it usually is: the text has changed, and another may know it better. All requests wait for a shadow
evaluation, so a single one takes no longer than a few cycles.

A drafter that was never loaded is not evaluated: it is loaded once its prediction, made of its size
and of the prior of untried pairs, promises a clear gain (`_WORTH_LOADING` of the scheduler). One
without weights (n-grams) keeps no state that could be evaluated. It costs nothing to load, so it is
chosen as soon as it promises most; the evidence against it ages and its prior does not, so it is
tried again after some thousand cycles without use.

Pure decisions: no clock, no tensors.
"""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from specrouter.cycle import ShadowEvaluation
from specrouter.profile.cycle_times import Workload, forward_ms
from specrouter.profile.evidence import PRIOR
from specrouter.profile.snapshot import Mode, PerformanceSnapshot
from specrouter.request.params import Chain
from specrouter.view import ChainDecision, EngineView

Ints = NDArray[np.int64]

MOST_TOKENS = 32  # of one evaluation, at most: its price is mostly the text before them
EXPLORED_SHARE = 0.01  # of the time; half of it while the drafter in use does as well as usual
_SURPRISE = 0.04  # by which fewer best children than usual are accepted when the text has changed
_FEW_CYCLES = 8  # after which a drafter may be evaluated again, and that one takes at most
_STALE_CYCLES = 64  # after which even a drafter is evaluated of which little is expected
_HOPEFUL = 1.2  # how much slower than the best a drafter may be to be evaluated earlier


def next_shadow_evaluation(
    view: EngineView,
    decision: ChainDecision,
    rows: Ints,
    workload: Workload,
    idle: Collection[str],
) -> ShadowEvaluation | None:
    """None: nobody is worth evaluating now, or the budget is spent.

    Args:
        decision: in use, with its prediction.
        rows: [R] of the requests that are routed by the scheduler and are of the workload's mode,
            which alone decisions are about: what others teach would not be asked for.
        idle: models that may be used, and that the cycle does not use.
    """
    snapshot, main = view.performance, decision.predicted
    assert main is not None
    surprised = is_surprised(snapshot, main.chain, workload.sampled)
    left_ms = snapshot.exploration_ms(EXPLORED_SHARE if surprised else EXPLORED_SHARE / 2)
    most_ms = min(left_ms, _FEW_CYCLES * snapshot.machine * main.cycle_ms)
    if most_ms <= 0.0:
        return None
    for name in _by_silence(snapshot, decision, surprised, idle):
        new = view.evaluable(name, rows)
        able = np.flatnonzero(new >= PRIOR)  # fewer say too little
        if not len(able):
            continue
        behind = view.missed(name, rows[able])
        best = int(np.argmin(behind))
        if forward_ms(snapshot, name, main.chain[-1], workload, int(behind[best])) <= most_ms:
            tokens = min(MOST_TOKENS, int(new[able[best]]))
            return ShadowEvaluation(name, int(rows[able[best]]), tokens)
    return None


def is_surprised(snapshot: PerformanceSnapshot, chain: Chain, sampled: Mode) -> bool:
    """Whether the drafts in use are accepted less than they usually are."""
    seen = snapshot.trees.get((chain[:-1], chain[-1], sampled))
    return seen is not None and seen.trials > 0.0 and seen.alpha - seen.alpha_now > _SURPRISE


def _by_silence(
    snapshot: PerformanceSnapshot,
    decision: ChainDecision,
    surprised: bool,
    idle: Collection[str],
) -> list[str]:
    """Drafters that may be evaluated, first who was not for longest."""
    found, best_ms = [], decision.predicted_ms[decision.chain]
    for chain, ms_per_token in decision.predicted_ms.items():
        if len(chain) != 2 or chain[0] in decision.chain or chain[0] not in idle:
            continue
        silence = snapshot.idle_cycles.get(chain[0], 0)
        is_early = surprised or ms_per_token <= _HOPEFUL * best_ms
        if silence >= (_FEW_CYCLES if is_early else _STALE_CYCLES):
            found.append((-silence, chain[0]))
    return [name for _, name in sorted(found)]
