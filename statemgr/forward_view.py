"""What one forward pass sees of a model's state: where its tokens go, what each may attend to.

Contract: tokens of the pack stand row after row, `counts[i]` consecutive ones of `rows[i]`. Token
`t` of row `r` at position `p` attends to the valid slots of `r` whose position is at most `p`; a
token tree restricts that further by a `TreeMask`. Without one the valid slots of a row have each a
position of their own, none beyond the slot's number: where there are no holes the two are equal.
Attention runs in groups of rows (`statemgr.row_groups`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from statemgr.arrays import Bools, Ints
from statemgr.key_paths import KeyPaths, PackPlaces, PackRows, PackTokens, TreePaths
from statemgr.kv_store import KVStore
from statemgr.layer_state import RecurrentKind, Tensors
from statemgr.recurrent_store import RecurrentPass
from statemgr.row_groups import READING_QUERIES, RowGroup

_MINUS_INFINITY = float("-inf")
_NOWHERE = np.int64(2**62)  # no query's position


@dataclass(frozen=True, eq=False)
class TreeMask:
    """Who descends from whom among a row's speculative slots, which positions do not tell.

    Row r's speculative slots are `starts[r] .. starts[r] + E`; token t of the pack may attend to
    the e-th of its row's where `visible[t, e]`. `visible` may be on the device alone.
    """

    starts: Ints  # [rows of the store]
    visible: Tensor  # [T, E] bool


class ForwardView:
    """Implements `modelpool.attention.packed.KVView` over a model's store and mask."""

    def __init__(
        self,
        store: KVStore,
        cache_mask: Bools,  # [rows, slots]
        positions: Ints,  # [rows, slots]
        tokens: PackTokens,
        groups: Sequence[RowGroup],
        tree: TreeMask | TreePaths | None = None,
        recurrent: RecurrentPass | None = None,
    ) -> None:
        self.groups = groups
        self._recurrent = recurrent
        self._tokens = tokens
        self._tree = tree if isinstance(tree, TreeMask) else None
        self._tree_paths = tree if isinstance(tree, TreePaths) else None
        self._store = store
        self._cache_mask = cache_mask
        self._positions = positions
        self._slots: dict[torch.device, Tensor] = {}
        self._paths: dict[torch.device, KeyPaths] = {}
        self._masks: dict[tuple[int, int, int | None, torch.dtype, torch.device], Tensor] = {}

    @property
    def attended(self) -> float:
        """Pairs of query and slot that attention computes, padding included; to read a row's keys
        and values costs as much as some queries more."""
        return sum(
            group.rows * (group.queries + READING_QUERIES) * group.length for group in self.groups
        )

    def scan(self, layer: int, kind: RecurrentKind, tokens: Tensors) -> Tensor:
        assert self._recurrent is not None, "no layer of the model is recurrent"
        return self._recurrent.scan(layer, kind, tokens)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        if layer in self._store.shared:  # they are another layer's, and there already
            return
        keys, values = self._store.layer(layer)
        slots = self.slots(keys.device)
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)

    def read(self, layer: int, group: RowGroup) -> tuple[Tensor, Tensor]:
        keys, values = (
            part.as_strided(
                (group.rows, group.length, *part.shape[1:]),
                (group.stride * part.stride(0), *part.stride()),
                part.storage_offset() + group.start * part.stride(0),
            )
            for part in self._store.layer(layer)
        )
        return keys.transpose(1, 2), values.transpose(1, 2)

    def mask(
        self,
        group: RowGroup,
        repeat: int,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        key = (id(group), repeat, window, dtype, device)
        if key not in self._masks:
            if group.has_holes or self._tree is not None:
                mask = self._compared(group, window, dtype, device)
                mask = mask.repeat(1, repeat, 1) if repeat > 1 else mask
            else:
                mask = self._cut(group, repeat, window, dtype, device)
            self._masks[key] = mask.unsqueeze(1)
        return self._masks[key]

    def arena(self, layer: int, window: int | None) -> tuple[Tensor, Tensor]:
        return self._store.layer(layer)

    def slots(self, device: torch.device) -> Tensor:
        if device not in self._slots:
            host = torch.from_numpy(self._tokens.slots)
            self._slots[device] = host.to(device, non_blocking=True)
        return self._slots[device]

    @cached_property
    def places(self) -> PackPlaces:
        """Only of a state whose slots are in the order of positions, and without a `TreeMask`."""
        assert self._tree is None, "a tree's paths are unknown"
        return PackPlaces.of(self._tokens, self._tree_paths)

    def key_paths(self, device: torch.device) -> KeyPaths:
        if device not in self._paths:
            self._paths[device] = self.places.on(device)
        return self._paths[device]

    @cached_property
    def pack_rows(self) -> PackRows:
        return PackRows.of(self._tokens, self._tree_paths)

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
        if self._tree is not None:
            self._restrict(allowed, self._tree, group)
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
        """[B, S + E] the position that each slot holds; `_NOWHERE` if invalid or not there."""
        held = self._positions[group.ids, : group.length]
        held = np.where(self._cache_mask[group.ids, : group.length], held, _NOWHERE)
        if group.real is not None:  # else no row is idle
            idle = group.positions[:, 0] < 0
            held[idle] = _NOWHERE
            held[idle, 0] = 0  # as in `_cut`
        if self._tree is None:
            return held
        # Slots beyond S, which nobody reads, take in what of a tree a row does not have.
        beyond = np.full((group.rows, self._tree.visible.shape[1]), _NOWHERE)
        return np.concatenate((held, beyond), axis=1)

    def _restrict(self, allowed: Tensor, tree: TreeMask, group: RowGroup) -> None:
        """Takes speculative slots that are no ancestors from `allowed` [B, Q, S + E]."""
        starts = tree.starts[group.ids, None]
        place = np.minimum(starts, group.length) + np.arange(tree.visible.shape[1])
        source = self._to(group.source, tree.visible.device)
        seen = tree.visible[source].to(allowed.device, non_blocking=True)  # [B, Q, E]
        index = self._to(place, allowed.device).unsqueeze(1).expand_as(seen)
        allowed.scatter_(2, index, seen & allowed.gather(2, index))

    def _to(self, values: NDArray[np.generic], device: torch.device) -> Tensor:
        return torch.from_numpy(values).to(device, non_blocking=True)
