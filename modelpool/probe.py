"""ProbeView: a short text through a model's attention, to compare one forward with another.

It replaces a KV store and holds the keys and values of a few requests as the layers give them. It
also learns the layers' shapes and sliding windows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from modelpool.attention.kv_view import (
    AttentionLayer,
    Ints,
    KVLayer,
    KVView,
    PackSlots,
    TreePaths,
)
from modelpool.errors import UnsupportedAttention, UnsupportedModelError
from modelpool.forward import Forward
from modelpool.recurrent import RecurrentKind, RecurrentLayer, StateKey, Tensors

T = TypeVar("T")

_PACKED = "packed attention"
MOST_DIFFERENCE = 0.2  # limit for logits, as a share of their spread, for any dtype


class HasVocabulary(Protocol):
    @property
    def device(self) -> torch.device: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def kv_layers(self) -> Mapping[int, KVLayer]: ...


def probed(
    forward: Forward,
    model: HasVocabulary,
    parts: Sequence[tuple[int, int]],
    kind: "type[ProbeView] | None" = None,
) -> tuple[Tensor, dict[int, int | None]]:
    """Return all logits of a few tokens that `forward` reads in parts, and its layers' windows."""
    length = parts[-1][1]
    tokens = (torch.arange(length, device=model.device) * 7919 + 11) % model.vocab_size
    probe, logits = (kind or ProbeView)(model.device, length, model.kv_layers), []
    for start, stop in parts:
        probe.begin(start, stop)
        positions = torch.arange(start, stop, device=model.device)
        read = forward(tokens[start:stop], positions, probe, positions - start)
        logits.append(read.logits)
    return torch.cat(logits), probe.windows


class ProbeView:
    """A few requests in a store of their own, for the parity probe.

    It learns the layers' shapes, which of them share keys and values, and `windows`: those of their
    attention.
    """

    def __init__(
        self,
        device: torch.device,
        slots: int,
        layers: Mapping[int, KVLayer] | None = None,
        rows: int = 1,
    ) -> None:
        """Make an empty store.

        `device`: device of the tokens; `slots`: slots of each row; `layers`: those that are known;
        the others are learned.
        """
        self._device = device
        self._slots = slots
        self._rows = rows
        self._kv: dict[int, tuple[Tensor, Tensor]] = {}
        self._sources: dict[int, int] = {}  # by layer that shares: the first that has its keys
        self._first: dict[tuple[object, ...], int] = {}
        self._held: list[Tensor] = []  # so that no memory is reused before all is learned
        for number, layer in (layers or {}).items():
            self._open(number, layer)
        self.recurrent: dict[StateKey, RecurrentLayer] = {}  # the learned ones
        self._states: dict[tuple[StateKey, int], Tensors] = {}  # by state and row
        self._counts: list[int] = []  # tokens of each row in the pack
        self.windows: dict[int, int | None] = {}
        self._layouts: dict[object, object] = {}
        self.pack: PackSlots

    def begin(self, start: int, stop: int) -> None:
        """Begin a pack of the first request's tokens at these positions."""
        self.begin_pack([(start, stop)])

    def begin_pack(self, spans: Sequence[tuple[int, int]]) -> None:
        """Begin a pack of several requests' tokens, row after row.

        `spans`: first position and the one after the last, of each row; the other rows have no
        tokens.
        """
        self._counts = [stop - start for start, stop in spans]
        rows = np.array([row for row, (start, stop) in enumerate(spans) if stop > start])
        starts, stops = np.array(spans)[rows].T
        positions = np.concatenate([np.arange(*spans[row]) for row in rows.tolist()])
        self.pack = PackSlots(
            rows=rows,
            counts=stops - starts,
            positions=positions,
            slots=np.repeat(self._slots * rows, stops - starts) + positions,
            tables=rows[:, None].astype(np.int32),
            block_slots=self._slots,
            lengths=stops,
            devices=(self._device,),
        )
        self._layouts.clear()

    def begin_tree(self, start: int, parents: Sequence[int]) -> Ints:
        """Begin a pack of a tree behind `start` tokens of the first request; return its positions.

        `parents`: parents of its nodes, -1 for the last of those tokens. Not for recurrent layers.
        """
        paths: list[list[int]] = []
        for node, parent in enumerate(parents):
            paths.append([*(paths[parent] if parent >= 0 else ()), node])
        depths = np.array([len(path) for path in paths])
        filled = [path + path[-1:] * (depths.max() - len(path)) for path in paths]
        self.begin(start, start + len(paths))
        starts, positions = np.full(self._rows, start), start - 1 + depths
        tree = TreePaths(starts, torch.tensor(filled, dtype=torch.int32))
        self.pack = replace(self.pack, positions=positions, tree=tree)
        return positions

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        if key.shape[:-1] != value.shape[:-1]:
            counts = f"{key.shape[1]} and {value.shape[1]}"
            raise UnsupportedAttention(f"layer {layer}: its keys and values have {counts} heads")
        if layer not in self._kv:
            self._learn(layer, key, value)
        if layer in self._sources:
            return
        slots = torch.from_numpy(self.pack.slots).to(key.device)
        for store, new in zip(self._kv[layer], (key, value), strict=True):
            store.index_copy_(0, slots, new.to(store.dtype))

    def scan(self, layer: int, kind: RecurrentKind, tokens: Tensors) -> Tensor:
        known = RecurrentLayer(tokens[0].device, tokens[0].dtype, kind)
        key = (layer, kind.name)
        self.recurrent[key] = known
        outputs: list[Tensor] = []
        parts = zip(*(torch.split(one, self._counts) for one in tokens), strict=True)
        for row, part in enumerate(parts):
            state = self._states.setdefault((key, row), known.empty())
            if len(part[0]):
                outputs.append(kind.scan(state, part))
        return torch.cat(outputs)

    def _learn(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._held += (key, value)
        source = self._first.setdefault((*_memory(key), *_memory(value)), layer)
        self._open(layer, _kv_layer(key, value, None if source == layer else source))

    def _open(self, number: int, layer: KVLayer) -> None:
        if layer.source is not None:
            self._sources[number] = layer.source
            self._kv[number] = self._kv[layer.source]
            return
        keys, values = (
            torch.zeros(
                (self._rows * self._slots, layer.kv_heads, width),
                dtype=layer.dtype,
                device=layer.device,
            )
            for width in (layer.head_dim, layer.value_dim)
        )
        values = keys[..., : layer.value_dim] if layer.is_latent else values
        self._kv[number] = (keys, values)

    def arena(self, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        self.windows[layer.number] = layer.window
        return self._kv[layer.number]

    def layout(self, build: Callable[[KVView], T]) -> T:
        if build not in self._layouts:
            self._layouts[build] = build(self)
        return cast(T, self._layouts[build])

    def layers(self) -> dict[int, KVLayer]:
        """Return the layers by their indices in the model, ascending."""
        return {
            layer: _kv_layer(*parts, self._sources.get(layer))
            for layer, parts in sorted(self._kv.items())
        }


def _kv_layer(keys: Tensor, values: Tensor, source: int | None) -> KVLayer:
    """Return the layer of keys [.., kv_heads, head_dim] and values [.., kv_heads, value_dim]."""
    return KVLayer(
        device=keys.device,
        dtype=keys.dtype,
        kv_heads=keys.shape[-2],
        head_dim=keys.shape[-1],
        value_dim=values.shape[-1],
        is_latent=_memory(keys[..., : values.shape[-1]]) == _memory(values),
        source=source,
    )


def _memory(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tensors of the same memory and layout."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()


def allowed_difference(dtype: torch.dtype, is_recurrent: bool = False) -> float:
    """Return the mean difference of logits, over their spread, that rounding alone may cause."""
    # Some models compute softmax or norms in float32 for any dtype, and so do all recurrent layers:
    # transformers sums them in chunks, the engine token by token.
    least = torch.finfo(torch.float32).eps if is_recurrent else 4e-9
    return min(300.0 * max(torch.finfo(dtype).eps, least), MOST_DIFFERENCE)


def check_parity(
    field: str, expected: Tensor, got: Tensor, allowed: float | None = None, cause: str = _PACKED
) -> None:
    """Raise `UnsupportedModelError` if logits have changed, or were no numbers before.

    Args:
        field: place of the model in the configuration.
        expected: logits before the change.
        got: logits after it.
        allowed: mean difference, over their spread; by default the rounding of the dtype.
        cause: cause of the change.
    """
    if not bool(expected.isfinite().all()):
        dtype = str(expected.dtype).removeprefix("torch.")
        reason = "its weights are damaged (download them again), or need another dtype"
        raise UnsupportedModelError(field, f"its own logits are no numbers in {dtype}: {reason}")
    difference = (expected.double() - got.double()).abs().mean() / expected.double().std()
    allowed = allowed_difference(expected.dtype) if allowed is None else allowed
    if not float(difference) <= allowed:
        raise UnsupportedModelError(
            field,
            f"{cause} changes its logits (mean difference {float(difference):.2g} of "
            f"their spread, {allowed:.2g} allowed)",
        )
