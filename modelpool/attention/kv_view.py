"""KVView: what a forward sees of a model's keys and values, and what attends over it.

Contract: a view says where the slots of a pack's rows are and what they hold, and nothing that one
backend alone needs: that a backend builds for itself from `PackSlots`, once a pass
(`KVView.layout`). K is stored after the rotary embedding: of the valid slots of its row a token
sees those whose positions are at most its own, and of the row's tree those on its own path.
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
NOWHERE = np.int64(2**62)  # no query's position

T = TypeVar("T")


class TreePaths(Protocol):
    """Who descends from whom among the speculative slots of a pack's rows.

    Row r's tree begins at slot `starts[r]` of the row, beyond all slots where it has none. The path
    of token t are the slots `starts[r] + paths[t, 0]`, `starts[r] + paths[t, 1]`, and so on, down
    to its own, which the rest repeats. With a token of no tree stand zeros.
    """

    @property
    def starts(self) -> Ints: ...  # by row of the store
    @property
    def paths(self) -> Tensor: ...  # [T, P] int32, on the host or on the device


class PackSlots(Protocol):
    """The R rows of a pack and its T tokens, `counts[i]` consecutive ones of `rows[i]`.

    On the host. A row is a contiguous piece of the arena, which has the keys and values of all
    slots.
    """

    @property
    def rows(self) -> Ints: ...  # [R] ascending
    @property
    def counts(self) -> Ints: ...  # [R]
    @property
    def positions(self) -> Ints: ...  # [T]
    @property
    def slots(self) -> Ints: ...  # [T] of the arena, where the tokens' keys and values go
    @property
    def firsts(self) -> Ints: ...  # [R] of the arena, where the rows begin
    @property
    def ends(self) -> Ints: ...  # [R] slots in use of each row
    @property
    def lengths(self) -> Ints: ...  # [R] of these those that are valid
    @property
    def reach(self) -> Ints: ...  # [R] slots from a row's first on that may be read
    @property
    def stride(self) -> int: ...  # slots from the usual place of a row to that of the next one
    @property
    def quantum(self) -> int: ...  # slots are best read in multiples of this
    @property
    def devices(self) -> Sequence[torch.device]: ...  # of the layers
    @property
    def tree(self) -> TreePaths | None: ...

    def held(self, rows: Ints, length: int) -> Ints:
        """[len(rows), length] the positions that slots of rows hold; `NOWHERE` where invalid."""


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
        """Pairs of query and slot that it computes, padding included; to read a row's keys and
        values costs as much as some queries more (`READING_QUERIES`)."""
