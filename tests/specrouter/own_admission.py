"""Admission policies of one's own."""

from specrouter.config import EngineConfig
from specrouter.slo.admission import Admission, AdmissionPolicy, Admit, fcfs
from specrouter.view import EngineView


class _Nobody(AdmissionPolicy):
    def for_engine(self, engine: EngineConfig, target: str) -> Admit:
        return lambda view: Admission()


class _OneAtATime(AdmissionPolicy):
    """First come, first served, and alone."""

    def for_engine(self, engine: EngineConfig, target: str) -> Admit:
        usual = fcfs(engine.prefill_chunk)

        def admit(view: EngineView) -> Admission:
            found = usual(view)
            came = () if view.running else found.admitted[:1]
            known = {*came, *(one.id for one in view.running)}
            return Admission(came, {each: n for each, n in found.chunks.items() if each in known})

        return admit


NOBODY, ONE_AT_A_TIME = _Nobody(), _OneAtATime()
