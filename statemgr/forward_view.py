"""View of a model's state for one forward pass: where its tokens are written and read."""

from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch import Tensor

from modelpool.attention.kv_view import AttentionLayer, PackSlots
from modelpool.recurrent import RecurrentKind, Tensors
from statemgr.kv_store import KVStore
from statemgr.recurrent_store import RecurrentPass

T = TypeVar("T")


class ForwardView:
    """Implementation of `KVView` over a model's store."""

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
        if layer in self._store.shared:  # another layer has written them already
            return
        keys, values = self._store.layer(layer)
        slots = self._slots_on(keys.device)
        keys.index_copy_(0, slots, key.to(keys.dtype))
        if layer not in self._store.latent:
            values.index_copy_(0, slots, value.to(values.dtype))

    def arena(self, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
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
