"""The earliest objective that could be attained now. Pure: it tries objectives on the policy."""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from specrouter.request.output import Feasible
from specrouter.slo.admission import Admit
from specrouter.view import EngineView, RequestView

# Requests per cycle that get this answer: it takes tens of milliseconds, during which no token is
# generated.
MOST_TOLD = 1
_PATIENT_MS = 1e6


def earliest_feasible(policy: Admit, view: EngineView, request: RequestView) -> Feasible:
    """Return the objective with which the policy would admit a request that came now and alone.

    TPOT is its own or the least feasible one, and TTFT the least beside that; to 5%.
    """

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
    """Return the least value from 1 to `_PATIENT_MS`, to 5%, that holds; None: none does.

    Larger values hold as well.
    """
    steps = math.ceil(math.log(_PATIENT_MS) / math.log(1.05))
    least = bisect_left(range(steps + 1), True, key=lambda step: holds(1.05**step))
    return 1.05**least if least <= steps else None
