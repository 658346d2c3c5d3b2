"""SLOs-Serve's admission as it was published, by the times that an engine measures.

It chooses once among the requests that came: those that it declines are best effort for good, and
others wait as long as need be. Source: SLOs-Serve (arXiv 2504.08784), sections 3 and 4.1.
"""

import math
from dataclasses import replace
from functools import lru_cache

from research.policies.autoregressive import Autoregressive
from research.policies.strict_pacing import Strict, StrictDecision
from specrouter.config import EngineConfig
from specrouter.slo.admission import Admission, AdmissionPolicy, Admit
from specrouter.slo.serve.measured_pacing import measured_pacing
from specrouter.slo.serve.pacing import Pacing
from specrouter.slo.serve.policy import PacingOf, by_objectives
from specrouter.slo.serve.requests import sorted_requests
from specrouter.view import EngineView

_MARGIN = 0.1  # share of every TPOT that is kept back where there are drafts


class _SlosServe(AdmissionPolicy):
    preempts = True

    def for_engine(self, engine: EngineConfig, target: str) -> Admit:
        measured = measured_pacing(target, engine.prefill_chunk, engine.most_batch_tokens)
        return slos_serve(lambda view: strict(measured(view)), engine.prefill_chunk)


SLOS_SERVE = _SlosServe()


@lru_cache(maxsize=16)
def strict(pacing: Pacing) -> Pacing:
    """Every batch is in time, and a fixed margin is kept back; without drafts, none."""
    if not pacing.alpha:
        return Autoregressive(pacing.times, pacing.idle_ms)
    return Strict(pacing.times, pacing.idle_ms, pacing.alpha, _MARGIN)


def slos_serve(pacing_of: PacingOf, prefill_chunk: int) -> Admit:
    """See `by_objectives`."""
    decide = by_objectives(pacing_of, prefill_chunk, patience_ms=math.inf, make=StrictDecision)

    def policy(view: EngineView) -> Admission:
        decided = decide(view)
        able = sorted_requests(view, pacing_of(view)).new
        late = (one.id for one in able if one.id not in decided.promised)
        return replace(decided, declined=(*decided.declined, *late))

    return policy
