"""An admission policy of one's own."""

from specrouter.config import EngineConfig
from specrouter.slo.admission import Admission, AdmissionPolicy, Admit


class _Nobody(AdmissionPolicy):
    def for_engine(self, engine: EngineConfig, target: str) -> Admit:
        return lambda view: Admission()


NOBODY = _Nobody()
