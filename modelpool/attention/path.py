"""Path attention: a token's keys in the order of positions, the last ones along its own path.

Contract: key j of a token has position j. It lies in the token's row: in slot j before the row's
tree, and from there on in the slots that the token's path through the tree names. The row's table
of blocks gives the place of its slots in the arena. A token therefore reads the same keys in the
same order whether it is in a tree, in a sequence or alone, and a kernel that splits them at fixed
positions gives it the same bits. `reference` defines in torch what the kernels compute; this module
imports no kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from modelpool.attention.backend import READING_QUERIES
from modelpool.attention.kv_view import Attention, AttentionLayer, Int32s, KVView, PackSlots

NO_TAIL = 2**30  # a position that no token has
_PIECE = 2**22  # numbers of keys that the reference processes at once


@dataclass(frozen=True, eq=False, kw_only=True)
class KeyPaths:
    """Place of the keys of T tokens: int32 tensors on one device.

    Key j of token t, for j up to `positions[t]`, is in slot s of its row: s is j for j < tails[t],
    else `tails[t] + path[t, j - tails[t]]`. Slot s of row r is slot
    `tables[r, s // block_slots] * block_slots + s % block_slots` of the arena.
    """

    rows: Tensor  # [T] indices into `tables`
    positions: Tensor  # [T]
    tails: Tensor  # [T] positions where trees begin; NO_TAIL, or beyond all others, without a tree
    path: Tensor  # [T, P], P >= 1; of any shape if there is no tree
    tables: Tensor  # [R, N] blocks
    block_slots: int
    longest: int  # the most keys of a token, or an upper bound


@dataclass(frozen=True, eq=False)
class PackPlaces:
    """Places of a pack's T tokens and of their keys, on the host.

    The paths of a tree may be on the device only. The slots of a row are in the order of positions
    up to its tree, whose nodes follow in any order that puts parents before children.
    """

    numbers: Int32s  # [4, T] slots of the tokens; rows, positions, tails of `KeyPaths`
    tables: Int32s  # [R, N]
    block_slots: int
    path: Tensor | None  # [T, P] int32; None if there is no tree
    longest: int  # the most keys of a token, or an upper bound

    @classmethod
    def of(cls, pack: PackSlots) -> "PackPlaces":
        numbers = np.empty((4, len(pack.positions)), dtype=np.int32)
        slots, rows, positions, tails = numbers
        tree, block = pack.tree, pack.block_slots
        slots[:] = pack.slots
        rows[:] = np.repeat(np.arange(len(pack.rows)), pack.counts)
        positions[:] = pack.positions
        tails[:] = NO_TAIL if tree is None else np.repeat(tree.starts[pack.rows], pack.counts)
        is_text = positions < tails
        where = pack.tables[rows, positions // block] * block + positions % block
        assert (slots == where)[is_text].all(), "slots are not in the order of positions"
        longest = int(positions.max(initial=0)) + 1
        return cls(numbers, pack.tables, block, None if tree is None else tree.paths, longest)

    def on(self, device: torch.device) -> KeyPaths:
        rows, positions, tails = torch.from_numpy(self.numbers[1:]).to(device, non_blocking=True)
        tables = torch.from_numpy(self.tables).to(device, non_blocking=True)
        path = rows.unsqueeze(1)  # any shape: there is no tree
        if self.path is not None:
            path = self.path.to(device, non_blocking=True)
        return KeyPaths(
            rows=rows,
            positions=positions,
            tails=tails,
            path=path,
            tables=tables,
            block_slots=self.block_slots,
            longest=self.longest,
        )


class PathLayout:
    """Layout of a view for path attention: its places, and a copy on each device that asks."""

    def __init__(self, view: KVView) -> None:
        self.places = PackPlaces.of(view.pack)
        self._on: dict[torch.device, KeyPaths] = {}

    def on(self, device: torch.device) -> KeyPaths:
        if device not in self._on:
            self._on[device] = self.places.on(device)
        return self._on[device]


PathKernels = Callable[[Tensor, Tensor, Tensor, KeyPaths, AttentionLayer], Tensor]


@dataclass(frozen=True)
class PathAttention:
    """Implementation of `Attention` with the given kernels."""

    kernels: PathKernels

    def attended(self, view: KVView) -> float:
        return pairs_of(view.pack)

    def __call__(self, view: KVView, layer: AttentionLayer, query: Tensor) -> Tensor:
        keys, values = view.arena(layer)
        paths = view.layout(PathLayout).on(query.device)
        return self.kernels(query.transpose(0, 1), keys, values, paths, layer)


def pairs_of(pack: PackSlots) -> float:
    """Return `Attention.attended` for kernels that read only the keys of each row."""
    return float(((pack.counts + READING_QUERIES) * pack.lengths).sum())


def reference_attention() -> Attention:
    return PathAttention(reference)


def reference(
    query: Tensor, keys: Tensor, values: Tensor, paths: KeyPaths, layer: AttentionLayer
) -> Tensor:
    """Compute path attention in plain torch, in the queries' precision.

    Args:
        query: [T, heads, head_dim]; more rows may follow those of the tokens.
        keys: [slots, kv_heads, head_dim], the arena of a layer.
        values: as `keys`, but their width may differ.
        paths: places of the tokens' keys.
        layer: settings of the layer.

    Returns:
        [T, heads, width of the values], with as many rows as `query`; NaN after the tokens' rows.
    """
    rows, query = len(query), query[: len(paths.positions)]
    place = torch.arange(paths.longest, device=query.device)
    slots, seen = _slots(paths, place), _seen(paths, place, layer.window)
    piece = max(1, _PIECE // (paths.longest * keys.shape[1] * keys.shape[2]))
    parts = zip(
        torch.split(query, piece), torch.split(slots, piece), torch.split(seen, piece), strict=True
    )
    return filled(torch.cat([_attended(*part, keys, values, layer) for part in parts]), rows)


def filled(own: Tensor, rows: int) -> Tensor:
    """Return `own` extended with NaN to [rows, ...]."""
    if len(own) == rows:
        return own
    return torch.cat((own, own.new_full((rows - len(own), *own.shape[1:]), torch.nan)))


def _attended(
    query: Tensor,  # [T, heads, head_dim]
    slots: Tensor,  # [T, L]
    seen: Tensor,
    keys: Tensor,
    values: Tensor,
    layer: AttentionLayer,
) -> Tensor:
    # Slots that are not seen may hold NaN, so they are set to zero before they are multiplied.
    own_keys, own_values = (
        part[slots].to(query.dtype).masked_fill(~seen[..., None, None], 0)
        for part in (keys, values)
    )  # [T, L, kv_heads, head_dim]
    tokens, heads, dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.view(tokens, kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("tkgd,tlkd->tkgl", grouped, own_keys) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    if layer.sinks is not None:
        sinks = layer.sinks.to(scores.dtype).view(1, kv_heads, -1, 1).expand(tokens, -1, -1, -1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(dim=-1)[..., : seen.shape[1]]
    return torch.einsum("tkgl,tlkd->tkgd", weights, own_values).reshape(
        tokens, heads, values.shape[2]
    )


def _slots(paths: KeyPaths, place: Tensor) -> Tensor:
    """Return the arena slots [T, L] of the keys; any valid slot where there is no key."""
    tails, positions = paths.tails.long()[:, None], paths.positions.long()[:, None]
    on_path = (place >= tails) & (place <= positions)
    if bool(on_path.any()):
        step = (place - tails).clamp(0, paths.path.shape[1] - 1)
        walked = tails + paths.path.long().gather(1, step)
    else:
        walked = place.expand_as(on_path)
    slots = torch.where(on_path, walked, torch.minimum(place, positions))
    block = paths.tables.long()[paths.rows.long()[:, None], slots // paths.block_slots]
    return block * paths.block_slots + slots % paths.block_slots


def _seen(paths: KeyPaths, place: Tensor, window: int | None) -> Tensor:
    """Return [T, L]: whether the token attends to a key at this position."""
    positions = paths.positions.long()[:, None]
    seen = place <= positions
    return seen if window is None else seen & (place > positions - window)
