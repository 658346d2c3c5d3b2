"""Keys and values of one model: flat slots, allocated once.

Contract: a slot holds the key and value that one token has in every layer. The store starts as
zeros and knows nothing of rows (`RowLayout`) or of validity, which is the mask's business
(`ModelState`). Layers of equal shape on one device share a tensor, so that moving slots is
one operation for all of them. A layer that reads another one's keys and values keeps none.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from statemgr.arrays import Ints


class LayerShape(Protocol):
    """What the store must know of an attention layer."""

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...  # of a key
    @property
    def value_dim(self) -> int: ...
    @property
    def is_latent(self) -> bool: ...  # the value is the first part of the key
    @property
    def source(self) -> int | None: ...  # the layer whose keys and values it reads


class KVStore:
    """Args: `layers`: those that attend, by their indices in the model."""

    def __init__(self, layers: Mapping[int, LayerShape], slots: int) -> None:
        self.slots = slots
        groups: dict[tuple[torch.device, torch.dtype, int, int, int, bool], list[int]] = {}
        for number, layer in layers.items():
            if layer.source is not None:
                continue
            widths = layer.head_dim, layer.value_dim
            key = (layer.device, layer.dtype, layer.kv_heads, *widths, layer.is_latent)
            groups.setdefault(key, []).append(number)
        # [layers, 2, slots, kv_heads, head_dim] per group; 0 is the key, 1 the value. Where these
        # differ in width, two tensors [layers, 1, slots, kv_heads, width]; of latents the first.
        self._tensors: list[Tensor] = []
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        for (device, dtype, heads, key_dim, value_dim, is_latent), members in groups.items():
            parts = [(2, key_dim)] if key_dim == value_dim else [(1, key_dim), (1, value_dim)]
            parts = [(1, key_dim)] if is_latent else parts
            with torch.inference_mode(False):  # rows are also emptied outside of inference
                tensors = [
                    torch.zeros(
                        (len(members), count, slots, heads, width), dtype=dtype, device=device
                    )
                    for count, width in parts
                ]
            self._tensors += tensors
            for index, number in enumerate(members):
                kept = [part for tensor in tensors for part in tensor[index]]
                self._layers[number] = kept[0], kept[-1][..., :value_dim]
        self.own = tuple(sorted(self._layers))  # numbers of the layers that keep anything
        self.latent = frozenset(at for at, one in layers.items() if one.is_latent)
        sources = {at: one.source for at, one in layers.items() if one.source is not None}
        self.shared = frozenset(sources)
        self._layers |= {number: self._layers[source] for number, source in sources.items()}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices of the layers, each once."""
        return tuple(dict.fromkeys(tensor.device for tensor in self._tensors))

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [slots, kv_heads, width] each, not copied."""
        return self._layers[number]

    def kept(self, number: int) -> Sequence[Tensor]:
        """The same, of latents the keys alone."""
        return self._layers[number][: 1 if number in self.latent else 2]

    def move(self, source: Ints, destination: Ints) -> None:
        """Copies flat slots `source` to `destination`, in all layers; the two may overlap."""
        if not len(source) or np.array_equal(source, destination):
            return
        if is_run(source) and is_run(destination):
            self._move_run(int(source[0]), int(destination[0]), len(source))
            return
        slots = self._on_devices(np.stack((source, destination)))
        for tensor in self._tensors:
            taken, given = slots[tensor.device]
            tensor.index_copy_(2, given, tensor.index_select(2, taken))

    def _move_run(self, source: int, destination: int, count: int) -> None:
        """The same of consecutive slots, without indices."""
        overlap = abs(source - destination) < count
        for tensor in self._tensors:
            taken = tensor.narrow(2, source, count)
            tensor.narrow(2, destination, count).copy_(taken.clone() if overlap else taken)

    def clear(self, start: int, count: int) -> None:
        """Zeros consecutive slots."""
        for tensor in self._tensors:
            tensor.narrow(2, start, count).zero_()

    def is_finite(self, start: int, count: int) -> bool:
        """Whether consecutive slots hold numbers only. Waits for each device."""
        # A sum of finite halves overflows in their own type.
        sums = [
            tensor.narrow(2, start, count).sum(dtype=torch.promote_types(tensor.dtype, torch.float))
            for tensor in self._tensors
        ]
        return all(bool(torch.isfinite(each)) for each in sums)

    def scrub(self, flat_slots: Ints) -> None:
        """Zeros slots: a NaN poisons attention even where a mask excludes it."""
        slots = self._on_devices(flat_slots)
        for tensor in self._tensors:
            tensor.index_fill_(2, slots[tensor.device], 0)

    def _on_devices(self, slots: Ints) -> dict[torch.device, Tensor]:
        """Copied once to each device, which the host does not wait for."""
        host = torch.from_numpy(slots)
        return {device: host.to(device, non_blocking=True) for device in self.devices}


def is_run(slots: Ints) -> bool:
    """Whether slots are consecutive."""
    return bool(slots[-1] - slots[0] == len(slots) - 1 and (np.diff(slots) == 1).all())
