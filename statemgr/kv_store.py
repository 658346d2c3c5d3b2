"""Keys and values of one model, in flat slots that are allocated once.

Contract: a slot holds the key and value of one token in every layer. The store knows neither rows
(`BlockTables`) nor validity (`ModelState`), and clears nothing: slots that are not keys of a query
are never read. Layers of equal shape on one device share a tensor, so that slots of all of them are
copied in one operation. A layer that reads another layer's keys and values has none of its own.
"""

import math
import mmap
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from modelpool.attention.kv_view import KVLayer
from statemgr.arrays import Ints

# Memory that is not shared with forked processes; Windows has no fork.
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
_CHECKED_SLOTS = 1024  # per step, because they are copied for the check


class KVStore:
    """Memory for the keys and values of all attention layers of a model.

    `layers` maps the index of each attention layer in the model to its shape.
    """

    def __init__(self, layers: Mapping[int, KVLayer], slots: int) -> None:
        self.slots = slots
        groups: dict[tuple[torch.device, torch.dtype, int, int, int, bool], list[int]] = {}
        for number, layer in layers.items():
            if layer.source is not None:
                continue
            widths = layer.head_dim, layer.value_dim
            key = (layer.device, layer.dtype, layer.kv_heads, *widths, layer.is_latent)
            groups.setdefault(key, []).append(number)
        # [layers, 2, slots, kv_heads, head_dim] per group; 0 is the key, 1 the value. If these
        # differ in width: two tensors [layers, 1, slots, kv_heads, width], for latents the first.
        self._tensors: list[Tensor] = []
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        for (device, dtype, heads, key_dim, value_dim, is_latent), members in groups.items():
            parts = [(2, key_dim)] if key_dim == value_dim else [(1, key_dim), (1, value_dim)]
            parts = [(1, key_dim)] if is_latent else parts
            with torch.inference_mode(False):  # rows are also cleared outside inference mode
                tensors = [
                    _zeros((len(members), count, slots, heads, width), dtype, device)
                    for count, width in parts
                ]
            self._tensors += tensors
            for index, number in enumerate(members):
                kept = [part for tensor in tensors for part in tensor[index]]
                self._layers[number] = kept[0], kept[-1][..., :value_dim]
        self.own = tuple(sorted(self._layers))  # numbers of layers with their own memory
        self.latent = frozenset(at for at, one in layers.items() if one.is_latent)
        sources = {at: one.source for at, one in layers.items() if one.source is not None}
        self.shared = frozenset(sources)
        self._layers |= {number: self._layers[source] for number, source in sources.items()}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The distinct devices of the layers."""
        return tuple(dict.fromkeys(tensor.device for tensor in self._tensors))

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer, [slots, kv_heads, width] each, not copied."""
        return self._layers[number]

    def kept(self, number: int) -> Sequence[Tensor]:
        """Return the tensors that a layer stores: keys and values, or the keys alone if latent."""
        return self._layers[number][: 1 if number in self.latent else 2]

    def copy(self, source: Ints, destination: Ints) -> None:
        """Copy slots `source` to `destination` in all layers; the two may overlap."""
        if not len(source) or np.array_equal(source, destination):
            return
        slots = self._on_devices(np.stack((source, destination)))
        for tensor in self._tensors:
            taken, given = slots[tensor.device]
            tensor.index_copy_(2, given, tensor.index_select(2, taken))

    def is_finite(self, slots: Ints) -> bool:
        """Return whether slots hold only finite numbers; this waits for each device."""
        for start in range(0, len(slots), _CHECKED_SLOTS):
            index = self._on_devices(slots[start : start + _CHECKED_SLOTS])
            for tensor in self._tensors:
                part = tensor.index_select(2, index[tensor.device])
                # A sum of finite half-precision numbers could overflow in their own type.
                total = part.sum(dtype=torch.promote_types(tensor.dtype, torch.float))
                if not bool(torch.isfinite(total)):
                    return False
        return True

    def _on_devices(self, slots: Ints) -> dict[torch.device, Tensor]:
        """Copy slots once to each device, without waiting for the copies."""
        host = torch.from_numpy(slots)
        return {device: host.to(device, non_blocking=True) for device in self.devices}


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros; on the CPU the system provides each page when it is first written.

    `torch.zeros` would write all of it at once. Raises `MemoryError`.
    """
    count = math.prod(shape)
    if device.type != "cpu" or not count:
        return torch.zeros(*shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, count * dtype.itemsize, **_PRIVATE)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{count * dtype.itemsize} bytes of keys and values: {error}") from error
    return torch.frombuffer(memory, dtype=dtype, count=count).view(*shape)
