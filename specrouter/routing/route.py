"""Route: a chain and shape of drafts; and who of a cycle's requests takes one, in which order.

Not here: which route requests get (`specrouter.routing.planner`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specrouter.cycle import ChainGroup
from specrouter.request.params import Chain, Speculation
from specrouter.request.running import RunningRequest
from specrouter.routing.decision_keeper import SCHEDULED, Override

_LOADED_COUNT = 2  # times as many rows as one has makes another party load its models instead


class Route(NamedTuple):
    """What requests share that form a group."""

    chain: Chain
    depth: int = 1
    width: int = 1
    hard_rejection: bool = False
    whole: bool = True
    branching: tuple[int, ...] | None = None

    def group(self, rows: Sequence[int]) -> ChainGroup:
        return ChainGroup(
            self.chain,
            self.depth,
            np.array(sorted(rows), dtype=np.int64),
            self.width,
            self.hard_rejection,
            self.whole,
            self.branching,
        )


class Party(NamedTuple):
    """Requests of a cycle that draft with the same models.

    `key`: of their decision; None where they name their chain, or want none. `chain`: that they
    named, or that was in use so far.
    """

    key: Override | None
    chain: Chain
    requests: dict[int, RunningRequest]  # by row


def parties_of(
    requests: Mapping[int, RunningRequest],
    target: str,
    available: Collection[str],
    in_use: Callable[[Override], Chain],
    is_open: Callable[[str], bool],
) -> list[Party]:
    """All requests by row, in the order in which parties may have models in memory.

    Where not all models have room, most rows go first, and those whose models are loaded count
    twice: a majority that comes and goes loads nothing.

    Args:
        in_use: chain that requests of a key draft with so far.
        is_open: whether a model could draft at once.
    """
    found: dict[tuple[Override | None, Chain], dict[int, RunningRequest]] = {}
    for row, request in requests.items():
        asked = request.spec.speculation
        key: Override | None = None
        chain: Chain = (target,)
        if isinstance(asked, Speculation) and asked.chain is not None:
            chain = (*(name for name in asked.chain[:-1] if name in available), target)
        elif isinstance(asked, Speculation):
            key = (asked.depth, asked.width)
            chain = in_use(key)
        elif asked is None:
            key = SCHEDULED
            chain = in_use(key)
        found.setdefault((key, chain), {})[row] = request
    parties = [Party(key, chain, those) for (key, chain), those in found.items()]

    def claim(party: Party) -> int:
        is_loaded = len(party.chain) > 1 and all(map(is_open, party.chain[:-1]))
        return len(party.requests) * (_LOADED_COUNT if is_loaded else 1)

    return sorted(parties, key=lambda party: (-claim(party), party.key is None))
