"""The rate at which a share of requests is in time, with few probes.

Pure. Contract: the share falls as the rate rises, up to noise. A probe takes minutes, so their
number is bounded, and what is found is between the two rates that are nearest to the wanted share.
"""

import math
from collections.abc import Callable, Mapping

_STEP = 1.5  # times the rate, until both sides are known
FEW, _MOST = 3, 5  # probes: a rate is found to about a fifth; until both sides are known, more


def rate_of(share_at: Callable[[float], float], first: float, wanted: float) -> float:
    """Args: `share_at`: probes a rate. `first`: to begin with, as good a guess as there is."""
    found: dict[float, float] = {}
    rate = first
    while len(found) < FEW or (None in _sides(found, wanted) and len(found) < _MOST):
        found[rate] = share_at(rate)
        rate = _next(found, wanted)
    return _between(found, wanted)


def _next(found: Mapping[float, float], wanted: float) -> float:
    low, high = _sides(found, wanted)
    if low is None:
        return min(found) / _STEP
    return max(found) * _STEP if high is None else math.sqrt(low * high)


def _between(found: Mapping[float, float], wanted: float) -> float:
    """By interpolation; where one side was never seen, the outermost rate of the other."""
    low, high = _sides(found, wanted)
    if low is None:
        return min(found)
    if high is None:
        return max(found)
    weight = (found[low] - wanted) / (found[low] - found[high])
    return float(low * (high / low) ** weight)


def _sides(found: Mapping[float, float], wanted: float) -> tuple[float | None, float | None]:
    """The highest rate below the first that falls short, and that one."""
    high = min((rate for rate, share in found.items() if share < wanted), default=None)
    low = max((rate for rate in found if high is None or rate < high), default=None)
    return low, high
