"""SLOs-Serve's admission as it was published, by the times that an engine measures.

It chooses once among the requests that came: those that it declines are best effort for good, and
others wait as long as need be. Source: SLOs-Serve (arXiv 2504.08784), sections 3 and 4.1.
"""

import math

from specrouter.config import EngineConfig
from specrouter.slo.admission import AdmissionPolicy, Admit
from specrouter.slo.serve.measured_pacing import measured_pacing
from specrouter.slo.serve.policy import PacingOf, by_objectives


class _SlosServe(AdmissionPolicy):
    preempts = True

    def for_engine(self, engine: EngineConfig, target: str) -> Admit:
        pacing = measured_pacing(target, engine.prefill_chunk, engine.most_batch_tokens)
        return slos_serve(pacing, engine.prefill_chunk)


SLOS_SERVE = _SlosServe()


def slos_serve(pacing_of: PacingOf, prefill_chunk: int) -> Admit:
    """See `by_objectives`."""
    return by_objectives(
        pacing_of,
        prefill_chunk,
        patience_ms=math.inf,
        is_final=True,
    )
