"""What one forward pass sees of a model's state: where its tokens go, and what its rows hold.

Contract: implements `modelpool.attention.kv_view`, which says what the parts mean.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from statemgr.arrays import Ints
from statemgr.blocks import BLOCK_SLOTS
from statemgr.kv_store import KVStore
from statemgr.layer_state import RecurrentKind, Tensors
from statemgr.recurrent_store import RecurrentPass

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class TreePaths:
    """Implements the protocol of this name."""

    starts: Ints  # [rows of the store]
    paths: Tensor  # [T, P] int32, on the host or on the device


@dataclass(frozen=True, eq=False, kw_only=True)
class PackSlots:
    """Implements the protocol of this name."""

    rows: Ints  # [R]
    counts: Ints  # [R]
    positions: Ints  # [T]
    slots: Ints  # [T]
    tables: NDArray[np.int32]  # [R, N]
    lengths: Ints  # [R]
    devices: Sequence[torch.device]
    tree: TreePaths | None
    block_slots: int = BLOCK_SLOTS


class NumberedLayer(Protocol):
    @property
    def number(self) -> int: ...


class ForwardView:
    """Implements `KVView` over a model's store."""

    def __init__(
        self, store: KVStore, pack: PackSlots, recurrent: RecurrentPass | None = None
    ) -> None:
        self.pack = pack
        self._recurrent = recurrent
        self._store = store
        self._slots: dict[torch.device, Tensor] = {}
        self._layouts: dict[object, object] = {}

    def scan(self, layer: int, kind: RecurrentKind, tokens: Tensors) -> Tensor:
        assert self._recurrent is not None, "no layer of the model is recurrent"
        return self._recurrent.scan(layer, kind, tokens)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        if layer in self._store.shared:  # they are another layer's, and there already
            return
        keys, values = self._store.layer(layer)
        slots = self._slots_on(keys.device)
        keys.index_copy_(0, slots, key.to(keys.dtype))
        if layer not in self._store.latent:
            values.index_copy_(0, slots, value.to(values.dtype))

    def arena(self, layer: NumberedLayer) -> tuple[Tensor, Tensor]:
        return self._store.layer(layer.number)

    def layout(self, build: Callable[["ForwardView"], T]) -> T:
        if build not in self._layouts:
            self._layouts[build] = build(self)
        return cast(T, self._layouts[build])

    def _slots_on(self, device: torch.device) -> Tensor:
        if device not in self._slots:
            host = torch.from_numpy(self.pack.slots)
            self._slots[device] = host.to(device, non_blocking=True)
        return self._slots[device]
