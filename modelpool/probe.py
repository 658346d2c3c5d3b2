"""ProbeView: a short text through a model's attention, to compare one forward with another.

It stands in for a KV store: keys and values of one request, as the layers hand them over. On its
way it learns the layers' shapes and sliding windows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelpool.attention.packed import OnDevice, QueryGroup
from modelpool.attention.pages import PackRows
from modelpool.attention.path import NO_TAIL, PackPlaces, Paths
from modelpool.errors import UnsupportedAttention, UnsupportedModelError
from modelpool.forward import Forward
from modelpool.recurrent import RecurrentKind, RecurrentLayer, Tensors, scan_tokens

_PACKED = "packed attention"
MOST_DIFFERENCE = 0.2  # of logits, of their spread, whatever the dtype


@dataclass(frozen=True)
class KVLayer:
    """Shape and place of one attention layer's keys and values.

    `source`: the layer whose keys and values it reads instead of its own.
    """

    device: torch.device
    dtype: torch.dtype
    kv_heads: int
    head_dim: int
    source: int | None = None

    @property
    def elements_per_token(self) -> int:
        """That it keeps."""
        return 0 if self.source is not None else 2 * self.kv_heads * self.head_dim


class HasVocabulary(Protocol):
    @property
    def device(self) -> torch.device: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def kv_layers(self) -> Mapping[int, KVLayer]: ...


class _Everywhere(Mapping[torch.device, Tensor]):
    """A small tensor on whatever device it is asked for."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, device: torch.device) -> Tensor:
        return self._tensor.to(device)

    def __iter__(self) -> Iterator[torch.device]:
        return iter((self._tensor.device,))

    def __len__(self) -> int:
        return 1


@dataclass(frozen=True, eq=False, kw_only=True)
class _ProbeGroup:
    """One request's tokens of a pack. `start`, `stop`: their positions."""

    row: int
    start: int
    stop: int
    take: OnDevice | None
    rows: int = 1
    put: OnDevice | None = None

    @property
    def queries(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class _ProbeRows:
    """Of requests without trees; see `PackRows`."""

    counts: NDArray[np.int64]
    firsts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    nodes: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class _ProbePlaces:
    """The same, on the host; see `PackPlaces`."""

    numbers: NDArray[np.int32]
    longest: int
    path: None = None


def probed(
    forward: Forward, model: HasVocabulary, parts: Sequence[tuple[int, int]]
) -> tuple[Tensor, dict[int, int | None]]:
    """All logits of a few tokens that `forward` reads in parts, and the windows of its layers."""
    length = parts[-1][1]
    tokens = (torch.arange(length, device=model.device) * 7919 + 11) % model.vocab_size
    probe, logits = ProbeView(length, model.kv_layers), []
    for start, stop in parts:
        probe.begin(start, stop)
        positions = torch.arange(start, stop, device=model.device)
        read = forward(tokens[start:stop], positions, probe, positions - start)
        logits.append(read.logits)
    return torch.cat(logits), probe.windows


class ProbeView:
    """A few requests in a store of their own, for the parity probe.

    It learns the layers' shapes, which of them share keys and values, and `windows`: what each of
    them asks its masks for.
    """

    def __init__(
        self, slots: int, layers: Mapping[int, KVLayer] | None = None, rows: int = 1
    ) -> None:
        """`slots`: of each row; `layers`: those that are known; the others are learned."""
        self._slots = slots
        self._rows = rows
        self._kv: dict[int, tuple[Tensor, Tensor]] = {}
        self._sources: dict[int, int] = {}  # by layer that shares: the first that has its keys
        self._first: dict[tuple[object, ...], int] = {}
        self._held: list[Tensor] = []  # so that no memory is used again before all is learned
        for number, layer in (layers or {}).items():
            self._open(number, layer)
        self.recurrent: dict[int, RecurrentLayer] = {}  # that were learned
        self._states: dict[tuple[int, int], Tensors] = {}  # by layer and row
        self._counts: list[int] = []  # of each row's tokens in the pack
        self.places: PackPlaces
        self.pack_rows: PackRows
        self._reading = 0  # the layer that was read last
        self.windows: dict[int, int | None] = {}
        self.groups: Sequence[QueryGroup] = ()
        self.attended = 0.0

    def begin(self, start: int, stop: int) -> None:
        """A pack of the first request's tokens at these positions."""
        self.begin_pack([(start, stop)])

    def begin_pack(self, spans: Sequence[tuple[int, int]]) -> None:
        """A pack of several requests' tokens, row after row. `spans`: first position and the one
        after the last, of each row; the rest of the rows have none."""
        counts = np.array([stop - start for start, stop in spans], dtype=np.int64)
        firsts = self._slots * np.arange(len(spans), dtype=np.int64)
        stops = np.array([stop for _, stop in spans], dtype=np.int64)
        positions = np.concatenate([np.arange(start, stop) for start, stop in spans])
        self._counts = counts.tolist()
        begins = np.repeat(firsts, counts)
        tails = np.full_like(positions, NO_TAIL)
        numbers = np.stack((begins + positions, begins, positions, tails)).astype(np.int32)
        self.places = _ProbePlaces(numbers, int(stops.max()))
        self.pack_rows = _ProbeRows(counts, firsts, stops, np.zeros_like(stops))
        self.groups = self._groups(spans, counts)

    def _groups(
        self, spans: Sequence[tuple[int, int]], counts: NDArray[np.int64]
    ) -> list[_ProbeGroup]:
        ends, groups = np.cumsum(counts), list[_ProbeGroup]()
        for row, (start, stop) in enumerate(spans):
            if stop > start:
                index = torch.arange(int(ends[row] - counts[row]), int(ends[row]))
                take = _Everywhere(index) if len(spans) > 1 else None
                groups.append(_ProbeGroup(row=row, start=start, stop=stop, take=take))
        return groups

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        if key.shape != value.shape:
            shapes = f"{tuple(key.shape[1:])} and {tuple(value.shape[1:])}"
            raise UnsupportedAttention(
                f"layer {layer}: its keys and values differ in shape, {shapes}"
            )
        if layer not in self._kv:
            self._learn(layer, key, value)
        if layer in self._sources:
            return
        slots = self.slots(key.device)
        for store, new in zip(self._kv[layer], (key, value), strict=True):
            store.index_copy_(0, slots, new)

    def scan(self, layer: int, kind: RecurrentKind, tokens: Tensors) -> Tensor:
        known = RecurrentLayer(tokens[0].device, tokens[0].dtype, kind)
        self.recurrent[layer] = known
        outputs: list[Tensor] = []
        parts = zip(*(torch.split(one, self._counts) for one in tokens), strict=True)
        for row, part in enumerate(parts):
            state = self._states.setdefault((layer, row), known.empty())
            outputs += scan_tokens(kind, state, part)
        return torch.stack(outputs)

    def _learn(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._held += (key, value)
        source = self._first.setdefault((*_memory(key), *_memory(value)), layer)
        self._open(layer, _kv_layer(key, None if source == layer else source))

    def _open(self, number: int, layer: KVLayer) -> None:
        if layer.source is not None:
            self._sources[number] = layer.source
            self._kv[number] = self._kv[layer.source]
            return
        shape = (self._rows * self._slots, layer.kv_heads, layer.head_dim)
        empty = torch.zeros(shape, dtype=layer.dtype, device=layer.device)
        self._kv[number] = (empty, torch.zeros_like(empty))

    def read(self, layer: int, group: QueryGroup) -> tuple[Tensor, Tensor]:
        assert isinstance(group, _ProbeGroup)
        self._reading = layer
        keys, values = (
            part.narrow(0, group.row * self._slots, self._slots) for part in self._kv[layer]
        )
        return keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)

    def mask(
        self, group: QueryGroup, repeat: int, window: int | None, dtype: torch.dtype, device: Any
    ) -> Tensor:
        assert isinstance(group, _ProbeGroup)
        self.windows[self._reading] = window
        query = torch.arange(group.start, group.stop, device=device).unsqueeze(1)
        slot = torch.arange(self._slots, device=device)
        allowed = slot <= query
        if window is not None:
            allowed &= slot > query - window
        mask = torch.zeros(allowed.shape, dtype=dtype, device=device)
        return mask.masked_fill_(~allowed, float("-inf")).repeat(repeat, 1)[None, None]

    def arena(self, layer: int, window: int | None) -> tuple[Tensor, Tensor]:
        self.windows[layer] = window
        return self._kv[layer]

    def slots(self, device: torch.device) -> Tensor:
        return torch.from_numpy(self.places.numbers[0]).to(device, torch.int64)

    def key_paths(self, device: torch.device) -> Paths:
        _, firsts, positions, tails = torch.from_numpy(self.places.numbers).to(device)
        path = torch.zeros_like(firsts).unsqueeze(1)
        return Paths(firsts, positions, tails, path, self.places.longest)

    def layers(self) -> dict[int, KVLayer]:
        """By their indices in the model, ascending."""
        return {
            layer: _kv_layer(keys, self._sources.get(layer))
            for layer, (keys, _) in sorted(self._kv.items())
        }


def _kv_layer(keys: Tensor, source: int | None) -> KVLayer:
    """Of keys [.., kv_heads, head_dim]."""
    return KVLayer(keys.device, keys.dtype, keys.shape[-2], keys.shape[-1], source)


def _memory(tensor: Tensor) -> tuple[object, ...]:
    """The same of tensors that are one, whatever object each is."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()


def allowed_difference(dtype: torch.dtype) -> float:
    """Of logits that rounding alone may tell apart, in the mean, of their spread."""
    # Some models compute softmax or norms in float32 whatever their dtype.
    return min(300.0 * max(torch.finfo(dtype).eps, 4e-9), MOST_DIFFERENCE)


def check_parity(
    field: str, expected: Tensor, got: Tensor, allowed: float | None = None, cause: str = _PACKED
) -> None:
    """Raises `UnsupportedModelError` where logits are not what they were.

    Args:
        allowed: mean difference, of their spread; by default the rounding of the dtype.
        cause: what changed them.
    """
    difference = (expected.double() - got.double()).abs().mean() / expected.double().std()
    allowed = allowed_difference(expected.dtype) if allowed is None else allowed
    if not float(difference) <= allowed:
        raise UnsupportedModelError(
            field,
            f"{cause} changes its logits (mean difference {float(difference):.2g} of "
            f"their spread, {allowed:.2g} allowed)",
        )
