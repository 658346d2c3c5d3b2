"""ProbeView: a short text through a model's attention, to compare one forward with another.

It stands in for a KV store: keys and values of one request, as the layers hand them over. On its
way it learns the layers' shapes and sliding windows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelpool.attention.packed import KVView, OnDevice, QueryGroup, UnsupportedAttention
from modelpool.attention.pages import PackRows
from modelpool.attention.path import NO_TAIL, PackPlaces
from modelpool.errors import UnsupportedModelError

_PACKED = "packed attention"
MOST_DIFFERENCE = 0.2  # of logits, of their spread, whatever the dtype

# tokens [T], positions [T], view, logit_index [n] -> logits [n, V]; see `PackedModel.forward`
Forward = Callable[[Tensor, Tensor, KVView, Tensor], Tensor]


class SizedForward(Protocol):
    """The same, of tensors on the host or the device; `sizes`: see `PackedModel`."""

    @property
    def sizes(self) -> tuple[int, ...]: ...

    def __call__(
        self, tokens: Tensor, positions: Tensor, view: KVView, logit_index: Tensor
    ) -> Tensor: ...


@dataclass(frozen=True)
class KVLayer:
    """Shape and place of one attention layer's keys and values."""

    device: torch.device
    dtype: torch.dtype
    kv_heads: int
    head_dim: int


class HasVocabulary(Protocol):
    @property
    def device(self) -> torch.device: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]: ...


@dataclass(frozen=True)
class _ProbeGroup:
    queries: int
    rows: int = 1
    take: OnDevice | None = None
    put: OnDevice | None = None


@dataclass(frozen=True, eq=False)
class _ProbePaths:
    """Of one request that begins at slot 0 and has no tree; see `KeyPaths`."""

    firsts: Tensor
    positions: Tensor
    tails: Tensor
    path: Tensor
    longest: int


@dataclass(frozen=True, eq=False)
class _ProbeRows:
    """Of one request that begins at slot 0 and has no tree; see `PackRows`."""

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

    @classmethod
    def of(cls, start: int, stop: int) -> "_ProbePlaces":
        positions = np.arange(start, stop, dtype=np.int32)
        tails = np.full_like(positions, NO_TAIL)
        return cls(np.stack((positions, np.zeros_like(positions), positions, tails)), stop)


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
        logits.append(forward(tokens[start:stop], positions, probe, positions - start))
    return torch.cat(logits), probe.windows


class ProbeView:
    """One request in a store of its own, for the parity probe.

    It learns the layers' shapes, and `windows`: what each of them asks its masks for.
    """

    def __init__(self, slots: int, layers: Sequence[KVLayer] = ()) -> None:
        """`layers`: those that are known; the others are learned."""
        self._slots = slots
        self._kv: dict[int, tuple[Tensor, Tensor]] = {}
        for number, layer in enumerate(layers):
            shape = (slots, layer.kv_heads, layer.head_dim)
            empty = torch.zeros(shape, dtype=layer.dtype, device=layer.device)
            self._kv[number] = (empty, torch.zeros_like(empty))
        self._start = self._stop = 0
        self.places: PackPlaces
        self.pack_rows: PackRows
        self._reading = 0  # the layer that was read last
        self.windows: dict[int, int | None] = {}
        self.groups: Sequence[QueryGroup] = ()
        self.attended = 0.0

    def begin(self, start: int, stop: int) -> None:
        self._start, self._stop = start, stop
        self.places = _ProbePlaces.of(start, stop)
        none = np.zeros(1, dtype=np.int64)
        self.pack_rows = _ProbeRows(none + stop - start, none, none + stop, none)
        self.groups = (_ProbeGroup(queries=stop - start),)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        if key.shape != value.shape:
            raise UnsupportedAttention("its keys and values differ in shape")
        if layer not in self._kv:
            shape = (self._slots, *key.shape[1:])
            self._kv[layer] = (key.new_zeros(shape), value.new_zeros(shape))
        for store, new in zip(self._kv[layer], (key, value), strict=True):
            store[self._start : self._stop] = new

    def read(self, layer: int, group: QueryGroup) -> tuple[Tensor, Tensor]:
        keys, values = self._kv[layer]
        self._reading = layer
        return keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)

    def mask(
        self, group: QueryGroup, repeat: int, window: int | None, dtype: torch.dtype, device: Any
    ) -> Tensor:
        self.windows[self._reading] = window
        query = torch.arange(self._start, self._stop, device=device).unsqueeze(1)
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
        return torch.arange(self._start, self._stop, device=device)

    def key_paths(self, device: torch.device) -> _ProbePaths:
        positions = torch.arange(self._start, self._stop, dtype=torch.int32, device=device)
        none = torch.zeros_like(positions)
        tails = torch.full_like(positions, NO_TAIL)
        return _ProbePaths(none, positions, tails, none.unsqueeze(1), self._stop)

    def layers(self) -> tuple[KVLayer, ...]:
        ordered = [self._kv[layer][0] for layer in sorted(self._kv)]
        return tuple(KVLayer(k.device, k.dtype, k.shape[1], k.shape[2]) for k in ordered)


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
