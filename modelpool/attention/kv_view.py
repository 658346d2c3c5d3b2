"""KVView: what a forward sees of a model's keys and values, and what attends over it.

Contract: a view says where the slots of a pack's rows are and what they hold, and nothing that one
backend alone needs: that a backend builds for itself from `PackSlots`, once a pass
(`KVView.layout`). K is stored after the rotary embedding. Key j of a token has position j; it lies
in the row's slot j, or, from the row's tree on, in the slot that the token's path names.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelpool.recurrent import RecurrentKind, Tensors

Ints = NDArray[np.int64]
Int32s = NDArray[np.int32]

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class TreePaths:
    """Who descends from whom among the speculative slots of a pack's rows.

    Row r's tree begins at slot `starts[r]` of the row, beyond all slots where it has none. The path
    of token t are the slots `starts[r] + paths[t, 0]`, `starts[r] + paths[t, 1]`, and so on, down
    to its own, which the rest repeats. With a token of no tree stand zeros.
    """

    starts: Ints  # by row of the store
    paths: Tensor  # [T, P] int32, on the host or on the device


@dataclass(frozen=True, eq=False, kw_only=True)
class PackSlots:
    """The R rows of a pack and its T tokens, `counts[i]` consecutive ones of `rows[i]`.

    On the host. Slot s of a row lies in block `s // block_slots` of the row's table: it is slot
    `tables[i, s // block_slots] * block_slots + s % block_slots` of the arena.
    """

    rows: Ints  # [R] ascending
    counts: Ints  # [R]
    positions: Ints  # [T]
    slots: Ints  # [T] of the arena, where the tokens' keys and values go
    tables: Int32s  # [R, N] blocks; behind a row's own ones any valid numbers
    block_slots: int
    lengths: Ints  # [R] slots of each row that are valid
    devices: Sequence[torch.device]  # of the layers
    tree: TreePaths | None = None


@dataclass(frozen=True, kw_only=True)
class KVLayer:
    """Shape and place of one attention layer's keys and values.

    Attributes:
        head_dim, value_dim: width of a key and of a value.
        is_latent: its value is the first part of its key.
        source: the layer whose keys and values it reads instead of its own.
    """

    device: torch.device
    dtype: torch.dtype
    kv_heads: int
    head_dim: int
    value_dim: int
    is_latent: bool = False
    source: int | None = None

    @property
    def elements_per_token(self) -> int:
        """That it keeps."""
        if self.source is not None:
            return 0
        return self.kv_heads * (self.head_dim + (0 if self.is_latent else self.value_dim))


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """How one layer of a model attends."""

    number: int
    scale: float  # of the scores
    window: int | None = None  # of positions, the own one included
    softcap: float | None = None
    # [heads] one more score of each query, of a key without a value: it takes weight, adds nothing
    sinks: Tensor | None = field(default=None, compare=False)


class KVView(Protocol):
    @property
    def pack(self) -> PackSlots: ...

    def scan(self, layer: int, kind: RecurrentKind, tokens: Tensors) -> Tensor:
        """Runs a recurrent layer over the pack: each token reads the state of the text before it.

        `tokens`: [T, ...] each, what `kind` reads of them. Returns [T, ...].
        """

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Stores the pack's keys [T, kv_heads, head_dim] and values [T, kv_heads, value_dim]."""

    def arena(self, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        """All that a layer reads: keys [slots, kv_heads, head_dim], values [.., value_dim]."""

    def layout(self, build: Callable[["KVView"], T]) -> T:
        """What a backend builds of this view: once, for all layers."""


# A view, a layer, and a pack's queries [heads, T, head_dim], to [T, heads, value_dim].
Attend = Callable[[KVView, AttentionLayer, Tensor], Tensor]


class Attention(Protocol):
    """The kernels of a backend, for one model."""

    def __call__(self, view: KVView, layer: AttentionLayer, query: Tensor, /) -> Tensor:
        """[heads, T, head_dim] queries of a pack to [T, heads, value_dim]."""

    def attended(self, view: KVView) -> float:
        """Pairs of query and key that it computes; to read a row's keys and values costs as much as
        some queries more (`READING_QUERIES`)."""
