"""Rows that are fed tokens and the nodes of trees, as a forward feeds them."""

from collections.abc import Sequence

import numpy as np
import torch

from statemgr import ModelState, TreeMask
from statemgr.arrays import Ints


def feed(
    state: ModelState, rows: Ints, counts: Ints, parents: Sequence[Sequence[int]]
) -> tuple[Ints, Ints, TreeMask | None]:
    """Appends `counts[i]` tokens to each row, then nodes with these parents: nodes before them, or
    -1, the last token.

    Positions and flat slots, and a tree mask where there are nodes.
    """
    positions: list[int] = []
    ancestors: list[list[int]] = []  # nodes of its row that each token descends from
    begun = state.lengths(rows).tolist()
    for base, count, above in zip(begun, counts.tolist(), parents, strict=True):
        lines = [_line(above, node) for node in range(len(above))]
        positions += [*range(base, base + count), *(base + count - 1 + len(one) for one in lines)]
        ancestors += [[]] * count + lines
    nodes = np.array([len(above) for above in parents])
    tokens = np.zeros(len(positions), dtype=np.int64)
    slots = state.append(rows, counts + nodes, tokens, np.array(positions))
    if not nodes.any():
        return np.array(positions), slots, None
    visible = torch.zeros(len(positions), int(nodes.max()), dtype=torch.bool)
    for token, line in enumerate(ancestors):
        visible[token, line] = True
    starts = np.full(len(state.ends), state.slots)
    starts[rows] = state.ends[rows] - nodes
    return np.array(positions), slots, TreeMask(starts, visible)


def _line(parents: Sequence[int], node: int) -> list[int]:
    """The node and its ancestors."""
    return [] if node < 0 else [node, *_line(parents, parents[node])]
