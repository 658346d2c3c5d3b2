"""Drafts that are known beforehand: what every tree of a request at every place would bring."""

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from research.sim.text import SimulatedText

WIDTH = 3
DEPTHS = (1, 2, 3, 4, 5, 6, 8)
_THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.45, 0.6)  # nodes that are worth less are not verified
_DEEPEST = max(DEPTHS)
_AT_ONCE = 8192  # trees

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class FrozenDrafts:
    """By request, output token before the draft, and way to draft; the first way is not to.

    Attributes:
        depths: [K] drafting steps.
        nodes: [N, L, K] that the target verifies.
        promised: [N, L, K] accepted nodes that whoever decides reckons with.
        accepted: [N, L, K] accepted nodes.
    """

    depths: Ints
    nodes: Floats
    promised: Floats
    accepted: Floats


def freeze(requests: int, tokens: int, acceptance: float, seed: int, known: bool) -> FrozenDrafts:
    """Trees of the simulator's law. `known`: the target verifies accepted nodes only, which is
    what can be done with drafts that are known beforehand; else those that promise most."""
    draws, text = np.random.default_rng(seed), SimulatedText(acceptance)
    ways = list(product(DEPTHS, (0.0,) if known else _THRESHOLDS))
    shape = (requests * tokens, 1 + len(ways))
    nodes, promised, accepted = (np.zeros(shape, dtype=np.float32) for _ in range(3))
    for first in range(0, shape[0], _AT_ONCE):
        part = slice(first, min(first + _AT_ONCE, shape[0]))
        trees = text.draw(part.stop - part.start, (WIDTH,) * _DEEPEST, draws)
        walked = trees.walk(trees.worth > 0.0, draws)
        depth = np.repeat(np.arange(1, _DEEPEST + 1), WIDTH)
        for way, (deepest, least) in enumerate(ways, 1):
            chosen = (depth <= deepest) & (trees.worth >= least)
            nodes[part, way] = chosen.sum(axis=1)
            promised[part, way] = (chosen * trees.worth).sum(axis=1)
            accepted[part, way] = (chosen & walked).sum(axis=1)
    if known:
        nodes = promised = accepted
    whole = (requests, tokens, shape[1])
    depths = np.array([0, *(deepest for deepest, _ in ways)])
    return FrozenDrafts(
        depths, nodes.reshape(whole), promised.reshape(whole), accepted.reshape(whole)
    )
