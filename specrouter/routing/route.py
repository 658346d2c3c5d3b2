"""Route: a chain and the shape of its drafts, and the groups of requests that share a decision.

Prefill: the prompt tokens that the target reads in the same pass.

Not here: the choice of a request's route (`specrouter.routing.planner`).
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
    """The chain and trees of a group of requests; see `ChainGroup` for the fields."""

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
    """The prompt tokens that the target reads beside the decoding requests.

    Attributes:
        rows, counts: rows that read, and the number of tokens of each.
        first_tokens: rows whose prompts end in this cycle.
        tokens: number of prompt tokens, the last ones of `first_tokens` included.
        requests: number of requests with unread prompts.
    """

    rows: Ints = field(default_factory=_nobody)
    counts: Ints = field(default_factory=_nobody)
    first_tokens: Ints = field(default_factory=_nobody)
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


class Asked(NamedTuple):
    """Requests that leave the same things open.

    `key` is that of their decision, or None if they name their chain or want none; `chain` is then
    that chain.
    """

    key: Override | None
    chain: Chain
    requests: dict[int, RequestView]  # by row


def by_what_they_ask(
    requests: Mapping[int, RequestView], target: str, available: Collection[str]
) -> list[Asked]:
    """Return all requests, by row, in groups that ask for the same.

    The groups with the most rows come first: they get their models if not all fit in memory.
    """
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
