"""The earliest objective that could be attained now. Pure: asks the policy about others."""

import math
from collections.abc import Callable
from dataclasses import replace

from specrouter.request.output import Feasible
from specrouter.slo.admission import Admit
from specrouter.view import EngineView, RequestView

# Requests of a cycle of which it is told: finding it out takes a millisecond or more each.
MOST_TOLD = 4


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
        return asked.id in decided.admitted and asked.id not in decided.declined

    patient_ms = 1e6
    tpot_ms = min((stage.tpot_ms for stage in request.stages), default=request.tpot_ms)
    if tpot_ms is not None and not admits(patient_ms, tpot_ms):
        tpot_ms = _least(
            lambda ms: admits(patient_ms, ms), min(2.0 * tpot_ms, patient_ms), patient_ms
        )
        if tpot_ms is None:
            return Feasible()
    begin_ms = min(max(1.0, request.ttft_ms or 1000.0), patient_ms)
    return Feasible(_least(lambda ms: admits(ms, tpot_ms), begin_ms, patient_ms), tpot_ms)


def _least(holds: Callable[[float], bool], begin: float, most: float) -> float | None:
    """The least value that holds, to 5%, where larger ones do too, looked for around `begin`, to
    which it is near in most cases; None: not even `most`. Downwards in steps of the factor 4, to 1
    at the least; upwards in steps of 4, 16, 256, ...: it may be any number of magnitudes away."""
    low = high = begin
    if holds(begin):
        while low > 1.0 and holds(low := max(1.0, low / 4.0)):
            high = low
    else:
        step = 4.0
        while not holds(high := min(most, high * step)):
            if high == most:
                return None
            low, step = high, step * step
    while high > 1.05 * low:
        middle = math.sqrt(low) * math.sqrt(high)  # the product might be too small for a number
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
