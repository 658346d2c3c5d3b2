"""Route: a chain and the shape of its drafts.

Prefill: the prompt tokens that the target reads in the same pass.

Not here: the choice of a request's route (`specrouter.routing.cycle_routes`).
"""

from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specrouter.cycle import ChainGroup, DraftShape, Option
from specrouter.profile.cycle_times import (
    Workload,
    drafter_ms,
    drafting_ms,
    model_ms,
    stage_ms,
)
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.request.params import Chain

Ints = NDArray[np.int64]


class Route(NamedTuple):
    """The chain and trees of a group of requests; see `ChainGroup` for the fields."""

    chain: Chain
    shape: DraftShape = DraftShape(1)
    whole: bool = True
    branching: tuple[int, ...] | None = None
    quotes: str | None = None

    def group(self, rows: Ints, predicted: Option | None) -> ChainGroup:
        """Return the group of these rows, which ascend."""
        return ChainGroup(
            chain=self.chain,
            shape=self.shape,
            rows=rows,
            whole=self.whole,
            branching=self.branching,
            predicted=predicted,
            quotes=self.quotes,
        )


def _no_rows() -> Ints:
    return np.array([], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Prefill:
    """The prompt tokens that the target reads beside the decoding requests.

    Attributes:
        rows, counts: rows that read, and the number of tokens of each.
        first_tokens: rows whose prompts end in this cycle.
        tokens: number of prompt tokens, the last ones of `first_tokens` included.
        requests: number of requests with unread prompts.
    """

    rows: Ints = field(default_factory=_no_rows)
    counts: Ints = field(default_factory=_no_rows)
    first_tokens: Ints = field(default_factory=_no_rows)
    tokens: int = 0
    requests: int = 0


def nodes_of(route: Route) -> int:
    """Return the number of nodes that are drafted for a request."""
    if route.branching is None:
        return route.shape.depth * route.shape.width
    return sum(accumulate(route.branching, mul))


def route_ms(snapshot: PerformanceSnapshot, workload: Workload, route: Route) -> float:
    """Return the time of everything before the target's pass, on a machine of normal speed."""
    chain, shape = route.chain, route.shape
    depths, widths = np.array([shape.depth]), np.array([shape.width])
    total = float(drafter_ms(snapshot, workload, chain, depths, widths)[0])
    places = np.array([workload.requests * (1 + nodes_of(route))])
    for name in chain[1:-1]:
        total += float(model_ms(snapshot, name, chain[-1], workload, places)[0])
        total += float(stage_ms(snapshot, "verify", places)[0])
    return total + drafting_ms(snapshot, workload.batch)
