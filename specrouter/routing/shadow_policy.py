"""The choice of the idle drafter to evaluate next, and of the row.

A shadow evaluation (`ShadowEvaluator`) costs a pass of the drafter over the tokens that it has not
read, so all of them together may take at most `EXPLORED_SHARE` of the time of the last minutes.
Half of that is spent at any time. The rest is kept for when the acceptance of the drafter in use
falls below its usual level: then the text has changed, and another drafter may predict it better.
All requests wait for a shadow evaluation, so a single one takes no longer than a few cycles.

A drafter that was never loaded is not evaluated. It is loaded once its prediction, made from its
size and the prior of untried pairs, is clearly better (`_WORTH_LOADING` of the policy `adaptive`).
A text drafter keeps no state that could be evaluated. It costs nothing to load, so it is chosen as
soon as its prediction is best. The evidence against it ages and its prior does not, so it is tried
again after some thousand cycles without use.

Pure decisions: no clock, no tensors.
"""

from collections.abc import Collection

import numpy as np

from specrouter.cycle import ShadowEvaluation
from specrouter.profile.cycle_times import Workload, forward_ms
from specrouter.profile.evidence import PRIOR
from specrouter.profile.snapshot import Mode, PerformanceSnapshot
from specrouter.request.params import Chain
from specrouter.view import ChainDecision, EngineView, RequestTable

MOST_TOKENS = 32  # tokens of one evaluation; most of its cost is reading the text before them
EXPLORED_SHARE = 0.01  # share of the time; half of it while acceptance is as usual
_SURPRISE = 0.04  # drop in the acceptance of best children that means that the text has changed
_FEW_CYCLES = 8  # cycles until a drafter may be evaluated again, and the most an evaluation takes
_STALE_CYCLES = 64  # cycles until a drafter is evaluated again even if it is predicted to be slow
_HOPEFUL = 1.2  # predicted time relative to the best, up to which `_FEW_CYCLES` applies


def next_shadow_evaluation(
    view: EngineView,
    decision: ChainDecision,
    requests: RequestTable,
    workload: Workload,
    idle: Collection[str],
) -> ShadowEvaluation | None:
    """Return the next shadow evaluation; None if none is worthwhile, or the budget is spent.

    Args:
        view: the engine at the beginning of the cycle.
        decision: the decision in use, with its prediction.
        requests: those that the scheduler routes and whose mode (sampled or greedy) is the
            workload's. Decisions are about this mode only, so others would teach nothing of use.
        workload: the requests that the scheduler routes.
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
        unread = requests.unread_by.get(name)
        if unread is None or name not in view.loaded:
            continue
        new = np.minimum(unread, requests.repeatable)
        able = np.flatnonzero(new >= PRIOR)  # fewer tokens are too little evidence
        if not len(able):
            continue
        behind = unread[able]
        best = int(np.argmin(behind))
        if forward_ms(snapshot, name, main.chain[-1], workload, int(behind[best])) <= most_ms:
            tokens = min(MOST_TOKENS, int(new[able[best]]))
            return ShadowEvaluation(name, int(requests.row[able[best]]), tokens)
    return None


def is_surprised(snapshot: PerformanceSnapshot, chain: Chain, sampled: Mode) -> bool:
    """Return whether the drafts in use are accepted less than they usually are."""
    seen = snapshot.trees.get((chain[:-1], chain[-1], sampled))
    return seen is not None and seen.trials > 0.0 and seen.alpha - seen.alpha_now > _SURPRISE


def _by_silence(
    snapshot: PerformanceSnapshot,
    decision: ChainDecision,
    surprised: bool,
    idle: Collection[str],
) -> list[str]:
    """Return the drafters that may be evaluated, longest idle first."""
    found, best_ms = [], decision.predicted_ms[decision.chain]
    for chain, ms_per_token in decision.predicted_ms.items():
        if len(chain) != 2 or chain[0] in decision.chain or chain[0] not in idle:
            continue
        silence = snapshot.idle_cycles.get(chain[0], 0)
        is_early = surprised or ms_per_token <= _HOPEFUL * best_ms
        if silence >= (_FEW_CYCLES if is_early else _STALE_CYCLES):
            found.append((-silence, chain[0]))
    return [name for _, name in sorted(found)]
