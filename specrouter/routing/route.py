"""Route: a chain and shape of drafts; and which requests of a cycle share one decision.

Prefill: what the target reads of prompts beside them.

Not here: which route requests get (`specrouter.routing.planner`).
"""

from collections.abc import Collection, Mapping, Sequence
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
from specrouter.request.params import Chain, Speculation
from specrouter.view import SCHEDULED, Override, RequestView

Ints = NDArray[np.int64]


class Route(NamedTuple):
    """What requests share that form a group; see `ChainGroup`."""

    chain: Chain
    shape: DraftShape = DraftShape(1)
    whole: bool = True
    branching: tuple[int, ...] | None = None
    quotes: str | None = None

    def group(self, rows: Sequence[int], predicted: Option | None) -> ChainGroup:
        return ChainGroup(
            chain=self.chain,
            shape=self.shape,
            rows=np.array(sorted(rows), dtype=np.int64),
            whole=self.whole,
            branching=self.branching,
            predicted=predicted,
            quotes=self.quotes,
        )


def _nobody() -> Ints:
    return np.array([], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Prefill:
    """What the target reads of prompts beside the decoding requests.

    Attributes:
        rows, counts: that read so many tokens.
        first_tokens: rows whose prompts end in this cycle.
        tokens: of prompts, and the first tokens' rows.
        requests: whose prompts are not read yet.
    """

    rows: Ints = field(default_factory=_nobody)
    counts: Ints = field(default_factory=_nobody)
    first_tokens: Ints = field(default_factory=_nobody)
    tokens: int = 0
    requests: int = 0


def nodes_of(route: Route) -> int:
    """That are drafted of a request's tree."""
    if route.branching is None:
        return route.shape.depth * route.shape.width
    return sum(accumulate(route.branching, mul))


def route_ms(snapshot: PerformanceSnapshot, workload: Workload, route: Route) -> float:
    """Of all that comes before the target's pass, on a quiet machine."""
    chain, shape = route.chain, route.shape
    depths, widths = np.array([shape.depth]), np.array([shape.width])
    total = float(drafter_ms(snapshot, workload, chain, depths, widths)[0])
    places = np.array([workload.requests * (1 + nodes_of(route))])
    for name in chain[1:-1]:
        total += float(model_ms(snapshot, name, chain[-1], workload, places)[0])
        total += float(stage_ms(snapshot, "verify", places)[0])
    return total + drafting_ms(snapshot, workload.batch)


class Asked(NamedTuple):
    """Requests that leave the same things open. `key`: of their decision; None where they name
    their chain, or want none; then `chain` is that."""

    key: Override | None
    chain: Chain
    requests: dict[int, RequestView]  # by row


def by_what_they_ask(
    requests: Mapping[int, RequestView], target: str, available: Collection[str]
) -> list[Asked]:
    """All requests by row. The most rows come first: they have their models where there is no room
    in memory for all."""
    found: dict[tuple[Override | None, Chain], dict[int, RequestView]] = {}
    for row, request in requests.items():
        asked = request.override
        key: Override | None = None
        chain: Chain = (target,)
        if asked is None:
            key = SCHEDULED
        elif isinstance(asked, Speculation) and asked.chain is not None:
            chain = (*(name for name in asked.chain[:-1] if name in available), target)
        elif isinstance(asked, Speculation):
            key = (asked.depth, asked.width)
        found.setdefault((key, chain), {})[row] = request
    groups = [Asked(key, chain, those) for (key, chain), those in found.items()]
    return sorted(groups, key=lambda asked: (-len(asked.requests), asked.key is not None))
