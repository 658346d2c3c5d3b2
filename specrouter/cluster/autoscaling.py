"""How many replicas a cluster should have, by the share of objectives that were attained.

Pure: a hook for whoever starts replicas (an operator, Ray Serve's autoscaling, a job beside
Prometheus). This service starts none by itself: their number is in its configuration. The figures
are those of `/metrics`, over a window of some minutes (docs/cluster.md).
"""

import math
from dataclasses import dataclass

_FEW = 20  # judged requests, of which a share says nothing: one more or less is 5 points


@dataclass(frozen=True)
class Seen:
    """What a window has shown.

    Attributes:
        judged: requests with an objective that ended; `attained` it.
        refused: requests that got 503 since there was no room, or no replica attained theirs.
        busy: mean share of rows, or of KV memory where that is more, of all replicas.
    """

    judged: int
    attained: int
    refused: int
    busy: float


@dataclass(frozen=True)
class Bounds:
    """`attainment`: share of objectives that is aimed at. One replica less is wanted only where
    those that are left would be at most `busy` afterwards."""

    least: int = 1
    most: int = 64
    attainment: float = 0.95
    busy: float = 0.6


@dataclass(frozen=True)
class Desired:
    replicas: int
    reason: str


def desired_replicas(replicas: int, seen: Seen, bounds: Bounds) -> Desired:
    """`replicas`: that serve now, at least one.

    More, in proportion to what was missed; one less at a time, since a replica that is missing
    costs objectives at once, and one too many only money.
    """
    asked = seen.judged + seen.refused
    share = seen.attained / asked if asked else 1.0
    wanted, reason = replicas, f"{share:.0%} of objectives attained"
    if asked >= _FEW and share < bounds.attainment:
        wanted = math.ceil(replicas * bounds.attainment / max(share, 0.5))
        reason += f", {bounds.attainment:.0%} are aimed at"
    elif replicas > 1 and not seen.refused:
        busy = seen.busy * replicas / (replicas - 1)
        if busy <= bounds.busy:
            wanted, reason = replicas - 1, f"{reason}, and {replicas - 1} would be {busy:.0%} busy"
    return Desired(min(bounds.most, max(bounds.least, wanted)), reason)
