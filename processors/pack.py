"""A model's pass over a pack: committed tokens that its state lacks, then a tree's nodes.

Contract: `run_pack` takes slots, runs the forward and returns logits; hidden states that a drafter
reads (`ActiveModel.hidden`) go to the state. If the forward raises, the slots that it took are
scrubbed and the state is as it was before.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelpool.attention.kv_view import TreePaths
from modelpool.forward import HiddenLayers
from modelpool.packed_model import PackedModel
from processors.contexts import Contexts
from processors.logits import on_device
from processors.sampler import Sampler
from processors.token_tree import ROOT, Ints, TokenTree
from statemgr import ModelState, StateManager, TokenOrder

NO_SLOT = np.int64(-1)


@dataclass(frozen=True, eq=False)
class ActiveModel:
    """A model that is held for a cycle, with what each of its forwards needs."""

    model: PackedModel
    state: ModelState
    manager: StateManager
    hidden: HiddenLayers = ()  # hidden states that drafters read

    def lag(self, rows: Ints) -> Ints:
        """Return the committed tokens, [R], that the state lacks, without the last one."""
        missing: Ints = self.manager.counts[rows] - 1 - self.state.lengths(rows)
        return missing


@dataclass(frozen=True, eq=False)
class FedTree:
    """A tree with the slots of its nodes in a model's state, for the rollback."""

    tree: TokenTree
    flat_slots: Ints  # [B, W]; NO_SLOT where a node was not fed, or is impossible


@dataclass(frozen=True, eq=False)
class PackResult:
    logits: Tensor  # [n, V] of the wanted tokens, row after row
    fed: FedTree
    earlier: Tensor  # [sum(earlier), V] of the plan's earlier tokens, row after row


@dataclass(frozen=True, eq=False)
class PackPlan:
    """Plan of a pack: row i feeds `committed[i]` tokens, then its nodes in `tree`, if any.

    Logits are wanted from a row's last committed token on, if `wanted[i]`, and also of the last
    `earlier[i]` of the other committed tokens that it feeds.
    """

    rows: Ints  # [R] ascending
    committed: Ints  # [R]
    wanted: NDArray[np.bool_]  # [R]
    earlier: Ints | None = None  # [R]


def run_pack(active: ActiveModel, plan: PackPlan, tree: TokenTree) -> PackResult:
    """Run one forward; the tree's rows are among the plan's."""
    model, state, device = active.model, active.state, active.model.device
    pack = _Layout.of(active, plan, tree)
    slots = state.append(plan.rows, pack.counts, pack.tokens, pack.positions)
    try:
        paths = None if tree.is_path else _tree_paths(active, tree, pack.is_node)
        order = _order(active, plan, pack, tree, slots) if state.is_recurrent else None
        output = model.forward(
            torch.from_numpy(pack.tokens),
            torch.from_numpy(pack.positions),
            state.view(plan.rows, pack.counts, pack.positions, slots, paths, order),
            torch.from_numpy(np.flatnonzero(pack.asked)),
            active.hidden,
        )
    except BaseException:
        state.scrub(slots)
        raise
    if output.hidden is not None:
        state.hidden.add(slots, output.hidden)
    node_slots = _node_slots(pack, tree, slots)
    logits = output.logits
    fed, earlier = FedTree(tree, node_slots), logits[:0]
    if plan.earlier is not None:
        wanted = pack.wanted[pack.asked]
        earlier = logits.index_select(0, on_device(np.flatnonzero(~wanted), device))
        logits = logits.index_select(0, on_device(np.flatnonzero(wanted), device))
    return PackResult(logits, fed, earlier)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Layout:
    """The T tokens of a pack: for each row its committed ones, then its nodes."""

    counts: Ints  # [R]
    tokens: Ints  # [T]
    positions: Ints  # [T]
    is_node: NDArray[np.bool_]  # [T]
    wanted: NDArray[np.bool_]  # [T] roots and nodes whose logits the plan wants
    asked: NDArray[np.bool_]  # [T] those, and the plan's earlier tokens

    @classmethod
    def of(cls, active: ActiveModel, plan: PackPlan, tree: TokenTree) -> "_Layout":
        nodes = np.zeros_like(plan.rows)
        nodes[np.searchsorted(plan.rows, tree.rows)] = tree.sizes
        counts = plan.committed + nodes
        cached = active.state.lengths(plan.rows)
        starts = np.cumsum(counts) - counts
        within = np.arange(int(counts.sum())) - np.repeat(starts, counts)
        is_node = within >= np.repeat(plan.committed, counts)
        positions = np.repeat(cached, counts) + within
        root = np.repeat(cached + plan.committed - 1, counts)[is_node]
        positions[is_node] = root + tree.depths[tree.real]
        tokens = active.manager.tokens[np.repeat(plan.rows, counts), positions]
        tokens[is_node] = tree.tokens[tree.real]
        from_root = within >= np.repeat(plan.committed - 1, counts)
        wanted = asked = from_root & np.repeat(plan.wanted, counts)
        if plan.earlier is not None:
            first = np.repeat(plan.committed - plan.wanted - plan.earlier, counts)
            asked = wanted | ((within >= first) & ~is_node & np.repeat(plan.earlier > 0, counts))
        return cls(
            counts=counts,
            tokens=tokens,
            positions=positions,
            is_node=is_node,
            wanted=wanted,
            asked=asked,
        )


def _node_slots(pack: _Layout, tree: TokenTree, slots: Ints) -> Ints:
    """Return the numbers of the nodes' slots, [B, W]."""
    node_slots = np.full(tree.tokens.shape, NO_SLOT)
    node_slots[tree.real] = slots[pack.is_node]
    return node_slots


def _order(
    active: ActiveModel, plan: PackPlan, pack: _Layout, tree: TokenTree, slots: Ints
) -> TokenOrder:
    """Return the order of tokens for recurrent layers.

    A row's last committed token may be rolled back later, like its nodes.
    """
    first = np.cumsum(pack.counts) - pack.counts
    unread = active.manager.counts[plan.rows] - 1 - pack.positions[first]
    certain = np.clip(unread, 0, plan.committed)
    if tree.is_path:
        return TokenOrder(certain)
    roots = slots[first + plan.committed - 1][np.searchsorted(plan.rows, tree.rows)]
    of_nodes = np.take_along_axis(_node_slots(pack, tree, slots), np.maximum(tree.parents, 0), 1)
    parents = np.full_like(slots, NO_SLOT)
    parents[pack.is_node] = np.where(tree.parents == ROOT, roots[:, None], of_nodes)[tree.real]
    return TokenOrder(certain, parents)


def tree_contexts(
    sampler: Sampler,
    tree: TokenTree,
    positions: Ints,
    device: torch.device,
    of_target: bool = True,
) -> Contexts:
    """Return the places after each root and node, row after row, with their grammars' masks.

    `positions`, [B], are those after the roots; for `of_target` see `GrammarMasks.at`.
    """
    counts = tree.sizes + 1
    which = np.repeat(np.arange(len(tree.rows)), counts)
    node = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts) - 1
    depths = np.concatenate((np.zeros((len(tree.rows), 1), np.int64), tree.depths), axis=1)
    depth = depths[which, node + 1]
    rows, after = tree.rows[which], positions[which] + depth
    needs_paths = sampler.needs_paths(tree.rows)
    if not (needs_paths or sampler.grammars):
        return Contexts(rows=rows, positions=after, depths=depth)
    texts = np.zeros((len(which), tree.height), dtype=np.int64)
    texts[node >= 0] = tree.paths()[tree.real]
    masks = sampler.masks(rows, after, depth, texts, of_target)
    return Contexts(
        rows=rows,
        positions=after,
        depths=depth,
        paths=on_device(texts, device) if needs_paths else None,
        masks=None if masks is None else on_device(masks, device),
    )


def _tree_paths(active: ActiveModel, tree: TokenTree, is_node: NDArray[np.bool_]) -> TreePaths:
    """Return the descent of the nodes, for attention."""
    state = active.state
    starts = np.full(len(state.ends), state.slots)  # rows without nodes: beyond every slot
    starts[tree.rows] = state.ends[tree.rows] - tree.sizes
    paths = np.zeros((len(is_node), tree.height), dtype=np.int32)
    paths[is_node] = tree.routes()[tree.real]
    return TreePaths(starts, torch.from_numpy(paths))
