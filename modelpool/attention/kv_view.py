"""KVView: the keys and values of a model as a forward sees them, and the attention over them.

Contract: a view says where the slots of a pack's rows are and what they hold, and nothing that only
one backend needs: a backend builds that from `PackSlots`, once per pass (`KVView.layout`). K is
stored after the rotary embedding. Key j of a token has position j. It lies in slot j of the row,
or, from the start of the row's tree on, in the slot that the token's path names.
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
    """Paths of tokens through the speculative slots of a pack's rows.

    The tree of row r begins at slot `starts[r]` of the row; without a tree, `starts[r]` is beyond
    all slots. The path of token t is the slots `starts[r] + paths[t, 0]`,
    `starts[r] + paths[t, 1]`, and so on, down to its own, which the remaining entries repeat.
    Tokens outside a tree have zeros.
    """

    starts: Ints  # indexed by row of the store
    paths: Tensor  # [T, P] int32, on the host or on the device


@dataclass(frozen=True, eq=False, kw_only=True)
class PackSlots:
    """The R rows of a pack and its T tokens: `counts[i]` consecutive tokens of `rows[i]`.

    All arrays are on the host. Slot s of a row lies in block `s // block_slots` of the row's table:
    it is slot `tables[i, s // block_slots] * block_slots + s % block_slots` of the arena.
    """

    rows: Ints  # [R] ascending
    counts: Ints  # [R]
    positions: Ints  # [T]
    slots: Ints  # [T] slots of the arena for the tokens' keys and values
    tables: Int32s  # [R, N] blocks; any valid numbers after a row's own ones
    block_slots: int
    lengths: Ints  # [R] number of valid slots of each row
    devices: Sequence[torch.device]  # devices of the layers
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
        """Number of elements that the layer stores for each token."""
        if self.source is not None:
            return 0
        return self.kv_heads * (self.head_dim + (0 if self.is_latent else self.value_dim))


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Attention settings of one layer of a model."""

    number: int
    scale: float  # factor of the scores
    window: int | None = None  # window in positions, including the own one
    softcap: float | None = None
    # [heads] one additional score of each query, for a key without a value: it takes weight only
    sinks: Tensor | None = field(default=None, compare=False)


class KVView(Protocol):
    @property
    def pack(self) -> PackSlots: ...

    def scan(self, layer: int, kind: RecurrentKind, tokens: Tensors) -> Tensor:
        """Run a recurrent layer over the pack: each token reads the state of the text before it.

        `tokens` are the inputs of `kind`, [T, ...] each. Returns [T, ...].
        """

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store the pack's keys [T, kv_heads, head_dim] and values [T, kv_heads, value_dim]."""

    def arena(self, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        """Return the keys [slots, kv_heads, head_dim] and values [.., value_dim] a layer reads."""

    def layout(self, build: Callable[["KVView"], T]) -> T:
        """Return the layout that `build` makes of this view, built once for all layers."""


# Maps a view, a layer and a pack's queries [heads, T, head_dim] to [T, heads, value_dim].
Attend = Callable[[KVView, AttentionLayer, Tensor], Tensor]


class Attention(Protocol):
    """The kernels of a backend, for one model."""

    def __call__(self, view: KVView, layer: AttentionLayer, query: Tensor, /) -> Tensor:
        """Map queries [heads, T, head_dim] of a pack to outputs [T, heads, value_dim]."""

    def attended(self, view: KVView) -> float:
        """Return the cost of attention over the view, in computed pairs of query and key.

        Reading a row's keys and values costs as much as `READING_QUERIES` more queries.
        """
