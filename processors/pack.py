"""Running one model over a pack: committed tokens that its state lacks, then drafted ones.

Contract: `run_pack` takes slots, runs the forward and returns logits. If the forward raises, the
slots that it took are scrubbed and the state is as it was before.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelpool.packed_model import PackedModel
from processors.token_tree import TokenTree
from statemgr import ModelState, StateManager

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PackResult:
    logits: Tensor  # [n, V] of the wanted tokens, row after row
    flat_slots: Ints  # [T]
    draft_places: Ints  # where in the pack the tree's nodes stand


@dataclass(frozen=True, eq=False)
class PackPlan:
    """Row i feeds `committed[i]` tokens, then its nodes; wants logits from its last committed
    token on if `wanted[i]`."""

    rows: Ints  # [R] ascending
    committed: Ints  # [R]
    nodes: Ints  # [R]
    wanted: NDArray[np.bool_]  # [R]


def run_pack(
    model: PackedModel,
    state: ModelState,
    manager: StateManager,
    plan: PackPlan,
    tree: TokenTree | None = None,
) -> PackResult:
    """One forward. `tree` holds the nodes of those rows whose `plan.nodes` is not 0."""
    counts = plan.committed + plan.nodes
    cached = state.lengths(plan.rows)
    starts = np.cumsum(counts) - counts
    within = np.arange(int(counts.sum())) - np.repeat(starts, counts)
    positions = np.repeat(cached, counts) + within
    is_node = within >= np.repeat(plan.committed, counts)
    tokens = np.where(is_node, 0, manager.tokens[np.repeat(plan.rows, counts), positions])
    first_wanted = np.repeat(plan.committed - 1 + (~plan.wanted) * (counts + 1), counts)
    slots = state.append(plan.rows, counts, tokens, positions)
    draft_places = np.flatnonzero(is_node)
    try:
        view = state.view(plan.rows, counts, positions, slots)
        fed = torch.from_numpy(tokens).to(model.device, non_blocking=True)
        if tree is not None and len(draft_places):
            places = torch.from_numpy(draft_places).to(model.device, non_blocking=True)
            fed.index_copy_(0, places, tree.flat(model.device))
        logits = model.forward(
            fed,
            torch.from_numpy(positions).to(model.device, non_blocking=True),
            view,
            torch.from_numpy(np.flatnonzero(within >= first_wanted)).to(model.device),
        )
    except BaseException:
        state.scrub(slots)
        raise
    return PackResult(logits, slots, draft_places)


def lag(state: ModelState, manager: StateManager, rows: Ints) -> Ints:
    """[R] committed tokens that a state lacks, the last one not counted."""
    missing: Ints = manager.counts[rows] - 1 - state.lengths(rows)
    return missing
