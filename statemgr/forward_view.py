"""What one forward pass sees of a model's state: where its tokens go, what each may attend to.

Contract: tokens of the pack stand row after row, `counts[i]` consecutive ones of `rows[i]`. Token
`t` of row `r` at position `p` attends to the valid slots of `r` whose position is at most `p`; a
token tree restricts that further by a `TreeMask`. Without one the valid slots of a row have each a
position of their own, none beyond the slot's number: where there are no holes the two are equal.
Attention runs in groups of rows, padded to the most queries that any has, as far as that costs less
than to attend apart: on a CPU long prefill chunks are alone. KV lengths are padded to a multiple of
`KV_QUANTUM` slots, masked: attention kernels then give a query the same bits whatever stands beside
it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from statemgr.kv_store import KVStore

KV_QUANTUM = 128
# What reading a row's keys and values costs, in queries: a fit to SDPA's times on a CPU in bfloat16
# (1 x 1, 1 x 12, 16 x 1, 16 x 2, 4 x 4 rows x queries, 256 slots) within 5%.
READING_QUERIES = 1.6
_MINUS_INFINITY = float("-inf")
_NOWHERE = np.int64(2**62)  # no query's position

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class _GroupLimits:
    """How far rows are padded so that they are attended together."""

    span_pairs: float  # pairs of query and slot that cost as much as attending once more
    alone: float  # a row with more queries than this is attended by itself
    max_idle: float  # rows that a group may span, for each row that it is about
    cells: float  # the most of a mask that more than one row share


_ON_CPU = _GroupLimits(span_pairs=1500.0, alone=16, max_idle=2.0, cells=math.inf)
# Reasoned, not measured. To attend once more is some ten launches in each layer: 50 to 100 us, in
# which an accelerator attends to some hundred thousand pairs. Their padding is all that speaks
# against rows of any kind, and the memory of the mask: 32 MiB in bfloat16, times the query heads
# that share a key.
_ON_ACCELERATOR = _GroupLimits(2.0**18, alone=math.inf, max_idle=math.inf, cells=2.0**24)


@dataclass(frozen=True, eq=False)
class RowGroup:
    """Rows `first .. first + rows` attended together, Q queries each; see `QueryGroup`."""

    first: int
    rows: int
    queries: int
    length: int  # S, slots read
    positions: Ints  # [B, Q] of the queries; -1 for an idle row, which attends to slot 0
    has_holes: bool  # invalid slots among those in use, in any of the rows that are not idle
    take: Mapping[torch.device, Tensor] | None
    put: Mapping[torch.device, Tensor] | None
    source: Ints  # [B, Q] where the queries stand in the pack; 0 for idle rows


@dataclass(frozen=True, eq=False)
class TreeMask:
    """Who descends from whom among a row's speculative slots, which positions do not tell.

    Row r's speculative slots are `starts[r] .. starts[r] + E`; token t of the pack may attend to
    the e-th of its row's where `visible[t, e]`. `visible` may be on the device alone.
    """

    starts: Ints  # [rows of the store]
    visible: Tensor  # [T, E] bool


class ForwardView:
    """Implements `modelpool.attention.packed.KVView` over a model's store and mask."""

    def __init__(
        self,
        store: KVStore,
        cache_mask: Bools,  # [rows, slots]
        positions: Ints,  # [rows, slots]
        flat_slots: Ints,  # [T] where the pack's tokens go
        groups: Sequence[RowGroup],
        tree: TreeMask | None = None,
    ) -> None:
        self.groups = groups
        self._tree = tree
        self._store = store
        self._cache_mask = cache_mask
        self._positions = positions
        self._slots = {
            device: torch.from_numpy(flat_slots).to(device, non_blocking=True)
            for device in store.devices
        }
        self._masks: dict[tuple[int, int, int | None, torch.dtype, torch.device], Tensor] = {}

    @property
    def attended(self) -> float:
        """Pairs of query and slot that attention computes, padding included; to read a row's keys
        and values costs as much as some queries more."""
        return sum(
            group.rows * (group.queries + READING_QUERIES) * group.length for group in self.groups
        )

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        keys, values = self._store.layer(layer)
        slots = self._slots[keys.device]
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)

    def read(self, layer: int, group: RowGroup) -> tuple[Tensor, Tensor]:
        slots, first, stop = self._store.slots, group.first, group.first + group.rows
        keys, values = (
            part.view(self._store.rows, slots, *part.shape[1:])[first:stop, : group.length]
            for part in self._store.layer(layer)
        )
        return keys.transpose(1, 2), values.transpose(1, 2)

    def mask(
        self,
        group: RowGroup,
        repeat: int,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        key = (id(group), repeat, window, dtype, device)
        if key not in self._masks:
            if group.has_holes or self._tree is not None:
                mask = self._compared(group, window, dtype, device)
                mask = mask.repeat(1, repeat, 1) if repeat > 1 else mask
            else:
                mask = self._cut(group, repeat, window, dtype, device)
            self._masks[key] = mask.unsqueeze(1)
        return self._masks[key]

    def _cut(
        self,
        group: RowGroup,
        repeat: int,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """[B, repeat * Q, S] where slots are positions: a query's mask is a piece of one strip,
        which only its position tells where to cut."""
        length = group.length
        strip = torch.full((2 * length - 1,), _MINUS_INFINITY, dtype=dtype, device=device)
        strip[0 if window is None else max(0, length - window) : length].zero_()
        # Without any slot to attend to, an idle row would divide by zero; it sees slot 0.
        place = length - 1 - np.tile(np.maximum(group.positions, 0), (1, repeat))
        pieces = strip.unfold(0, length, 1).index_select(0, self._to(place.reshape(-1), device))
        return pieces.view(*place.shape, length)

    def _compared(
        self, group: RowGroup, window: int | None, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """[B, Q, S] where slots hold any positions."""
        allowed = self._allowed(group, window, device)
        if self._tree is not None:
            self._restrict(allowed, self._tree, group)
            allowed = allowed[:, :, : group.length]
        zero = torch.zeros((), dtype=dtype, device=device)
        return torch.where(allowed, zero, torch.full_like(zero, _MINUS_INFINITY))

    def _allowed(self, group: RowGroup, window: int | None, device: torch.device) -> Tensor:
        """[B, Q, S + E] may the query attend to the slot? Of no slot are the last E."""
        held: Any = self._held(group)[:, None]
        query: Any = np.maximum(group.positions, 0)[:, :, None]
        if device.type != "cpu":  # compared there: the result is larger than the two
            held, query = self._to(held, device), self._to(query, device)
        allowed = held <= query
        if window is not None:
            allowed &= held > query - window
        return torch.from_numpy(allowed) if device.type == "cpu" else allowed

    def _held(self, group: RowGroup) -> Ints:
        """[B, S + E] the position that each slot holds; `_NOWHERE` if invalid or not there."""
        rows = slice(group.first, group.first + group.rows)
        held = self._positions[rows, : group.length]
        held = np.where(self._cache_mask[rows, : group.length], held, _NOWHERE)
        if group.take is not None:  # else no row is idle
            idle = group.positions[:, 0] < 0
            held[idle] = _NOWHERE
            held[idle, 0] = 0  # as in `_cut`
        if self._tree is None:
            return held
        # Slots beyond S, which nobody reads, take in what of a tree a row does not have.
        beyond = np.full((group.rows, self._tree.visible.shape[1]), _NOWHERE)
        return np.concatenate((held, beyond), axis=1)

    def _restrict(self, allowed: Tensor, tree: TreeMask, group: RowGroup) -> None:
        """Takes speculative slots that are no ancestors from `allowed` [B, Q, S + E]."""
        starts = tree.starts[group.first : group.first + group.rows, None]
        place = np.minimum(starts, group.length) + np.arange(tree.visible.shape[1])
        source = self._to(group.source, tree.visible.device)
        seen = tree.visible[source].to(allowed.device, non_blocking=True)  # [B, Q, E]
        index = self._to(place, allowed.device).unsqueeze(1).expand_as(seen)
        allowed.scatter_(2, index, seen & allowed.gather(2, index))

    def _to(self, values: NDArray[np.generic], device: torch.device) -> Tensor:
        return torch.from_numpy(values).to(device, non_blocking=True)


@dataclass(frozen=True)
class _Span:
    """Entries `first .. stop` of the pack's rows that are attended together."""

    first: int
    stop: int


@dataclass(frozen=True)
class GroupPlanner:
    """Splits a pack into row groups. All arrays are on the host.

    rows [R] ascending; counts [R] tokens of each; positions [T]; ends [R] slots in use, of which
    lengths [R] are valid.
    """

    rows: Ints
    counts: Ints
    positions: Ints
    ends: Ints
    lengths: Ints
    slots: int
    devices: Sequence[torch.device]  # of the layers

    @property
    def _limits(self) -> _GroupLimits:
        is_here = any(device.type == "cpu" for device in self.devices)
        return _ON_CPU if is_here else _ON_ACCELERATOR

    @cached_property
    def _offsets(self) -> Ints:
        return np.concatenate(([0], np.cumsum(self.counts)))

    def plan(self) -> tuple[RowGroup, ...]:
        spans = self._spans()
        return tuple(self._group(span, sole=len(spans) == 1) for span in spans)

    def _spans(self) -> list[_Span]:
        """Neighbours are attended together as long as padding them to the most queries and the
        longest row costs less than attending apart."""
        rows, counts = self.rows.tolist(), self.counts.tolist()
        ends, limits = self.ends.tolist(), self._limits
        spans: list[_Span] = []
        start, queries, length = 0, 0, 0  # of the span that grows
        for index, (row, count, end) in enumerate(zip(rows, counts, ends, strict=True)):
            slots = -(-end // KV_QUANTUM) * KV_QUANTUM
            if index > start:
                reach = row - rows[start] + 1
                before = rows[index - 1] - rows[start] + 1
                together = reach * (max(queries, count) + READING_QUERIES) * max(length, slots)
                apart = before * (queries + READING_QUERIES) * length
                apart += (count + READING_QUERIES) * slots
                joins = max(count, counts[index - 1]) <= limits.alone
                joins &= reach <= limits.max_idle * (index - start + 1)
                joins &= reach * max(queries, count) * max(length, slots) <= limits.cells
                if not joins or together > apart + limits.span_pairs:
                    spans.append(_Span(start, index))
                    start, queries, length = index, 0, 0
            queries, length = max(queries, count), max(length, slots)
        return [*spans, _Span(start, len(rows))] if rows else []

    def _group(self, span: _Span, sole: bool) -> RowGroup:
        rows = self.rows[span.first : span.stop]
        counts = self.counts[span.first : span.stop]
        first, reach, queries = int(rows[0]), int(rows[-1] - rows[0] + 1), int(counts.max())
        length = -(-int(self.ends[span.first : span.stop].max()) // KV_QUANTUM) * KV_QUANTUM
        length = min(length, self.slots)
        own = slice(span.first, span.stop)
        has_holes = bool((self.ends[own] != self.lengths[own]).any())
        if sole and len(rows) == reach and len(self.positions) == reach * queries:
            positions = self.positions.reshape(reach, queries)
            source = np.arange(len(self.positions)).reshape(reach, queries)
            return RowGroup(first, reach, queries, length, positions, has_holes, None, None, source)
        # Row i's tokens fill the head of its Q places; the rest repeat its last token.
        place = np.minimum(np.arange(queries), counts[:, None] - 1)  # [R, Q]
        source = self._offsets[span.first : span.stop, None] + place
        positions = np.full((reach, queries), -1, dtype=np.int64)
        take = np.zeros((reach, queries), dtype=np.int64)
        take[rows - first] = source
        positions[rows - first] = self.positions[source]
        real = np.arange(queries) < counts[:, None]
        put = ((rows - first)[:, None] * queries + np.arange(queries))[real]
        return RowGroup(
            first,
            reach,
            queries,
            length,
            positions,
            has_holes,
            self._on_devices(take.reshape(-1)),
            self._on_devices(put),
            take,
        )

    def _on_devices(self, values: Ints) -> dict[torch.device, Tensor]:
        host = torch.from_numpy(np.ascontiguousarray(values))
        return {device: host.to(device, non_blocking=True) for device in self.devices}
