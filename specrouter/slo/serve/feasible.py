"""The earliest objective that could be attained now. Pure: asks the policy about others."""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from specrouter.request.output import Feasible
from specrouter.slo.admission import Admit
from specrouter.view import EngineView, RequestView

# Requests of a cycle of which it is told: to find it out takes tens of milliseconds, in which no
# token is made.
MOST_TOLD = 1
_PATIENT_MS = 1e6


def earliest_feasible(policy: Admit, view: EngineView, request: RequestView) -> Feasible:
    """What the policy would admit a request with that came now, and alone: its own TPOT or the
    least that is feasible, and the least TTFT beside that; to 5%."""

    def admits(ttft_ms: float, tpot_ms: float | None) -> bool:
        asked = replace(
            request,
            arrived_s=view.now_s,
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
            e2e_ms=None,
            stages=(),
            declined=False,
        )
        decided = policy(replace(view, waiting=(asked,)))
        return asked.id in decided.promised

    tpot_ms = min((stage.tpot_ms for stage in request.stages), default=request.tpot_ms)
    if tpot_ms is not None and not admits(_PATIENT_MS, tpot_ms):
        tpot_ms = _least(lambda ms: admits(_PATIENT_MS, ms))
        if tpot_ms is None:
            return Feasible()
    return Feasible(_least(lambda ms: admits(ms, tpot_ms)), tpot_ms)


def _least(holds: Callable[[float], bool]) -> float | None:
    """The least value from 1 to `_PATIENT_MS`, to 5%, that holds, where larger ones do too; None:
    none does."""
    steps = math.ceil(math.log(_PATIENT_MS) / math.log(1.05))
    least = bisect_left(range(steps + 1), True, key=lambda step: holds(1.05**step))
    return 1.05**least if least <= steps else None
