"""Attention by torch's `scaled_dot_product_attention`, on any device.

Contract: rows of a pack are attended in groups (`modelpool.attention.row_groups`), over masks.
Where there are no holes and no tree, the valid slots of a row hold each its own number as a
position, and a mask is cut out of one strip.
"""

from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from modelpool.attention.backend import READING_QUERIES
from modelpool.attention.kv_view import (
    NOWHERE,
    Attention,
    AttentionLayer,
    Ints,
    KVView,
    PackSlots,
    TreePaths,
)
from modelpool.attention.row_groups import GroupPlanner, RowGroup

_MINUS_INFINITY = float("-inf")


def sdpa() -> Attention:
    return SdpaAttention()


class SdpaAttention:
    """Implements `Attention`."""

    def attended(self, view: KVView) -> float:
        groups = view.layout(SdpaLayout).groups
        return sum(
            group.rows * (group.queries + READING_QUERIES) * group.length for group in groups
        )

    def __call__(self, view: KVView, layer: AttentionLayer, query: Tensor) -> Tensor:
        """Group by group of B rows with Q queries each. The query heads of a key/value group are
        folded into the query axis: no copies of keys and values, and larger matrix products."""
        parts = []
        layout = view.layout(SdpaLayout)
        arena = view.arena(layer)
        for group in layout.groups:
            picked = (
                query if group.take is None else query.index_select(1, group.take[query.device])
            )
            keys, values = (layout.read(part, group) for part in arena)
            rows, kv_heads, _, _ = keys.shape
            heads, _, dim = query.shape
            repeat, queries = heads // kv_heads, group.queries
            is_single = rows == queries == 1  # a token alone, which is decoded most often
            if is_single:
                folded = picked.reshape(1, kv_heads, repeat, dim)
            else:
                folded = (
                    picked.reshape(kv_heads, repeat, rows, queries, dim)
                    .permute(2, 0, 1, 3, 4)
                    .reshape(rows, kv_heads, repeat * queries, dim)
                )
            mask = layout.mask(group, repeat, layer.window, query.dtype, query.device)
            if layer.softcap is None and layer.sinks is None:
                out = F.scaled_dot_product_attention(
                    folded, keys, values, attn_mask=mask, scale=layer.scale
                )
            else:
                out = _by_scores(folded, keys, values, mask, layer)
            if is_single:
                out = out.reshape(1, heads, -1)
            else:
                out = (
                    out.reshape(rows, kv_heads, repeat, queries, -1)
                    .permute(0, 3, 1, 2, 4)
                    .reshape(rows * queries, heads, -1)
                )
            parts.append(out if group.put is None else out.index_select(0, group.put[out.device]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class SdpaLayout:
    """What SDPA needs of a view."""

    def __init__(self, view: KVView) -> None:
        self._pack = view.pack
        self.groups = GroupPlanner(view.pack).plan()
        self._masks: dict[tuple[int, int, int | None, torch.dtype, torch.device], Tensor] = {}

    @cached_property
    def _visible(self) -> Tensor | None:
        return None if self._pack.tree is None else _visible(self._pack, self._pack.tree)

    def read(self, part: Tensor, group: RowGroup) -> Tensor:
        """Of an arena's keys or values [slots, kv_heads, head_dim] those of a group's rows, not
        copied: [B, kv_heads, S, head_dim]."""
        rows = part.as_strided(
            (group.rows, group.length, *part.shape[1:]),
            (group.stride * part.stride(0), *part.stride()),
            part.storage_offset() + group.start * part.stride(0),
        )
        return rows.transpose(1, 2)

    def mask(
        self,
        group: RowGroup,
        repeat: int,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Additive mask [B, 1, repeat * Q, S]; `window` counts positions, own one included."""
        key = (id(group), repeat, window, dtype, device)
        if key not in self._masks:
            if group.has_holes or self._visible is not None:
                mask = self._compared(group, window, dtype, device)
                mask = mask.repeat(1, repeat, 1) if repeat > 1 else mask
            else:
                mask = self._cut(group, repeat, window, dtype, device)
            self._masks[key] = mask.unsqueeze(1)
        return self._masks[key]

    def _cut(
        self,
        group: RowGroup,
        repeat: int,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """[B, repeat * Q, S] where slots are positions: a query's mask is a piece of one strip,
        which only its position tells where to cut."""
        length = group.length
        strip = torch.full((2 * length - 1,), _MINUS_INFINITY, dtype=dtype, device=device)
        strip[0 if window is None else max(0, length - window) : length].zero_()
        # Without any slot to attend to, an idle row would divide by zero; it sees slot 0.
        place = length - 1 - np.tile(np.maximum(group.positions, 0), (1, repeat))
        pieces = strip.unfold(0, length, 1).index_select(0, self._to(place.reshape(-1), device))
        return pieces.view(*place.shape, length)

    def _compared(
        self, group: RowGroup, window: int | None, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """[B, Q, S] where slots hold any positions."""
        allowed = self._allowed(group, window, device)
        if self._visible is not None:
            self._restrict(allowed, self._visible, group)
            allowed = allowed[:, :, : group.length]
        zero = torch.zeros((), dtype=dtype, device=device)
        return torch.where(allowed, zero, torch.full_like(zero, _MINUS_INFINITY))

    def _allowed(self, group: RowGroup, window: int | None, device: torch.device) -> Tensor:
        """[B, Q, S + E] may the query attend to the slot? Of no slot are the last E."""
        held: Any = self._held(group)[:, None]
        query: Any = np.maximum(group.positions, 0)[:, :, None]
        if device.type != "cpu":  # compared there: the result is larger than the two
            held, query = self._to(held, device), self._to(query, device)
        allowed = held <= query
        if window is not None:
            allowed &= held > query - window
        return torch.from_numpy(allowed) if device.type == "cpu" else allowed

    def _held(self, group: RowGroup) -> Ints:
        """[B, S + E] the position that each slot holds; `NOWHERE` if invalid or not there."""
        held = self._pack.held(group.ids, group.length)
        if group.real is not None:  # else no row is idle
            idle = group.positions[:, 0] < 0
            held[idle] = NOWHERE
            held[idle, 0] = 0  # as in `_cut`
        if self._visible is None:
            return held
        # Slots beyond S, which nobody reads, take in what of a tree a row does not have.
        beyond = np.full((group.rows, self._visible.shape[1]), NOWHERE)
        return np.concatenate((held, beyond), axis=1)

    def _restrict(self, allowed: Tensor, visible: Tensor, group: RowGroup) -> None:
        """Takes speculative slots that are no ancestors from `allowed` [B, Q, S + E]."""
        assert self._pack.tree is not None
        starts = self._pack.tree.starts[group.ids, None]
        place = np.minimum(starts, group.length) + np.arange(visible.shape[1])
        source = self._to(group.source, visible.device)
        seen = visible[source].to(allowed.device, non_blocking=True)  # [B, Q, E]
        index = self._to(place, allowed.device).unsqueeze(1).expand_as(seen)
        allowed.scatter_(2, index, seen & allowed.gather(2, index))

    def _to(self, values: NDArray[np.generic], device: torch.device) -> Tensor:
        return torch.from_numpy(values).to(device, non_blocking=True)


def _visible(pack: PackSlots, tree: TreePaths) -> Tensor:
    """[T, E] is the e-th slot of its row's tree on a token's path? A token of no tree comes before
    all its slots."""
    nodes = max(1, int((pack.ends - tree.starts[pack.rows]).max(initial=0)))
    paths = tree.paths.to(pack.devices[0], torch.int64, non_blocking=True)
    seen = torch.zeros((len(paths), nodes), dtype=torch.bool, device=paths.device)
    return seen.scatter_(1, paths, True)


def _by_scores(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, layer: AttentionLayer
) -> Tensor:
    """What SDPA has no argument for: Gemma 2 squashes scores by `softcap * tanh(score / softcap)`,
    gpt-oss has a sink of each head. Of queries [B, kv_heads, repeat * Q, head_dim]."""
    scores = query @ keys.transpose(-1, -2) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    scores = scores + mask
    if layer.sinks is not None:
        kv_heads, each = scores.shape[1:3]
        repeat = len(layer.sinks) // kv_heads
        sinks = layer.sinks.to(scores.dtype).view(1, kv_heads, repeat, 1, 1)
        sinks = sinks.expand(len(scores), -1, -1, each // repeat, -1).flatten(2, 3)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(query.dtype, torch.float32))
    return weights[..., : keys.shape[2]].to(query.dtype) @ values
