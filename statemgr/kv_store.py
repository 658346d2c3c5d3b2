"""Keys and values of one model: flat slots, allocated once.

Contract: a slot holds the key and value that one token has in every layer. The store knows nothing
of rows (`BlockTables`) or of validity (`ModelState`), and clears nothing: what is no key of a query
is never read. Layers of equal shape on one device share a tensor, so that copying slots is one
operation for all of them. A layer that reads another one's keys and values keeps none.
"""

import math
import mmap
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from modelpool.attention.kv_view import KVLayer
from statemgr.arrays import Ints

# Not shared with forked processes; Windows has no fork.
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
_CHECKED_SLOTS = 1024  # at once: they are copied for it


class KVStore:
    """Args: `layers`: those that attend, by their indices in the model."""

    def __init__(self, layers: Mapping[int, KVLayer], slots: int) -> None:
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
                    _zeros((len(members), count, slots, heads, width), dtype, device)
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

    def copy(self, source: Ints, destination: Ints) -> None:
        """Copies slots `source` to `destination`, in all layers; the two may overlap."""
        if not len(source) or np.array_equal(source, destination):
            return
        slots = self._on_devices(np.stack((source, destination)))
        for tensor in self._tensors:
            taken, given = slots[tensor.device]
            tensor.index_copy_(2, given, tensor.index_select(2, taken))

    def is_finite(self, slots: Ints) -> bool:
        """Whether slots hold numbers only. Waits for each device."""
        for start in range(0, len(slots), _CHECKED_SLOTS):
            index = self._on_devices(slots[start : start + _CHECKED_SLOTS])
            for tensor in self._tensors:
                part = tensor.index_select(2, index[tensor.device])
                # A sum of finite halves overflows in their own type.
                total = part.sum(dtype=torch.promote_types(tensor.dtype, torch.float))
                if not bool(torch.isfinite(total)):
                    return False
        return True

    def _on_devices(self, slots: Ints) -> dict[torch.device, Tensor]:
        """Copied once to each device, which the host does not wait for."""
        host = torch.from_numpy(slots)
        return {device: host.to(device, non_blocking=True) for device in self.devices}


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On the CPU memory that the system gives page by page, when it is written; `torch.zeros` would
    write all of it. Raises `MemoryError`."""
    count = math.prod(shape)
    if device.type != "cpu" or not count:
        return torch.zeros(*shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, count * dtype.itemsize, **_PRIVATE)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{count * dtype.itemsize} bytes of keys and values: {error}") from error
    return torch.frombuffer(memory, dtype=dtype, count=count).view(*shape)
