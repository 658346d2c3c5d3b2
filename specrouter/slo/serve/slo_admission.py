"""The admission policy `slo`, by the times that an engine measures."""

from specrouter.config import EngineConfig
from specrouter.slo.admission import AdmissionPolicy, Admit
from specrouter.slo.serve.measured_pacing import amortized, measured_pacing
from specrouter.slo.serve.policy import by_objectives


class _Slo(AdmissionPolicy):
    preempts = True

    def for_engine(self, engine: EngineConfig, target: str) -> Admit:
        chunk = engine.prefill_chunk
        pacing = measured_pacing(target, chunk, engine.most_batch_tokens)
        return by_objectives(amortized(pacing, chunk), chunk, never_behind=True)


SLO = _Slo()
