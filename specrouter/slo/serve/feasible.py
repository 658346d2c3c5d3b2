"""The earliest objective that could be attained now. Pure: it tries objectives on the policy."""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from specrouter.request.output import Feasible
from specrouter.slo.admission import Admit
from specrouter.view import EngineView, RequestTable

# Requests per cycle that get this answer: it takes tens of milliseconds, during which no token is
# generated.
MOST_ANSWERED = 1
_PATIENT_MS = 1e6


def earliest_feasible(policy: Admit, view: EngineView, request: RequestTable) -> Feasible:
    """Return the objective with which the policy would admit this request, if it came now, alone.

    TPOT is its own or the least feasible one, and TTFT the least beside that; to 5%.
    """

    def admits(ttft_ms: float, tpot_ms: float | None) -> bool:
        asked = replace(
            request,
            arrived_s=np.array([view.now_s]),
            ttft_ms=np.array([ttft_ms]),
            tpot_ms=np.array([tpot_ms], dtype=np.float64),
            tightest_ms=np.array([tpot_ms], dtype=np.float64),
            e2e_ms=np.array([np.nan]),
            has_stages=np.array([False]),
            declined=np.array([False]),
        )
        decided = policy(replace(view, waiting=asked))
        return int(request.id[0]) in decided.promised

    asked_ms = float(request.tightest_ms[0])
    tpot_ms = None if math.isnan(asked_ms) else asked_ms
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
