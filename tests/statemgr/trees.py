"""Rows that are fed tokens and the nodes of trees, as a forward feeds them."""

from collections.abc import Sequence

import numpy as np
import torch

from modelpool.attention.kv_view import TreePaths
from statemgr import ModelState
from statemgr.arrays import Ints


def feed(
    state: ModelState, rows: Ints, counts: Ints, parents: Sequence[Sequence[int]]
) -> tuple[Ints, Ints, TreePaths | None]:
    """Appends `counts[i]` tokens to each row, then nodes with these parents: nodes before them, or
    -1, the last token.

    Positions and flat slots, and the paths of the tree where there are nodes.
    """
    positions: list[int] = []
    routes: list[list[int]] = []  # nodes of its row down to each token
    begun = state.lengths(rows).tolist()
    for base, count, above in zip(begun, counts.tolist(), parents, strict=True):
        lines = [_line(above, node) for node in range(len(above))]
        positions += [*range(base, base + count), *(base + count - 1 + len(one) for one in lines)]
        routes += [[]] * count + lines
    nodes = np.array([len(above) for above in parents])
    tokens = np.zeros(len(positions), dtype=np.int64)
    slots = state.append(rows, counts + nodes, tokens, np.array(positions))
    if not nodes.any():
        return np.array(positions), slots, None
    height = max(map(len, routes))
    paths = [[*route, *[(route or [0])[-1]] * (height - len(route))] for route in routes]
    starts = np.full(len(state.ends), state.slots)
    starts[rows] = state.ends[rows] - nodes
    return np.array(positions), slots, TreePaths(starts, torch.tensor(paths, dtype=torch.int32))


def _line(parents: Sequence[int], node: int) -> list[int]:
    """The node's ancestors, and the node."""
    return [] if node < 0 else [*_line(parents, parents[node]), node]
