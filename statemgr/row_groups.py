"""RowGroup: rows of a pack that are attended together, and the plan of such groups.

Groups are padded to the most queries that any of their rows has, as far as that costs less than to
attend apart: on a CPU long prefill chunks are alone. KV lengths are padded to a multiple of
`KV_QUANTUM` slots, masked: attention kernels then give a query the same bits whatever is computed
beside it. Rows stand in one group where their extents begin at multiples of one distance
(`RowLayout.stride`); the places between that have none of the pack's rows are idle.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from statemgr.arrays import Ints
from statemgr.row_layout import RowLayout

KV_QUANTUM = 128
# What reading a row's keys and values costs, in queries: a fit to SDPA's times on a CPU in bfloat16
# (1 x 1, 1 x 12, 16 x 1, 16 x 2, 4 x 4 rows x queries, 256 slots) within 5%.
READING_QUERIES = 1.6


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


@dataclass(frozen=True, eq=False, kw_only=True)
class RowGroup:
    """B places attended together, Q queries each; see `QueryGroup`."""

    ids: Ints  # [B] the row of each place; of an idle one any
    start: int  # flat slot of the first place
    stride: int  # slots from one place to the next
    queries: int
    length: int  # S, slots read
    positions: Ints  # [B, Q] of the queries; -1 for an idle row, which attends to slot 0
    has_holes: bool  # invalid slots among those in use, in any of the rows that are not idle
    source: Ints  # [B, Q] where the queries stand in the pack; 0 for idle rows
    real: Ints | None  # [n] of B * Q, the group's tokens; None: the pack as it stands
    devices: Sequence[torch.device]  # of the layers

    @cached_property
    def take(self) -> Mapping[torch.device, Tensor] | None:
        return None if self.real is None else self._on_devices(self.source.reshape(-1))

    @cached_property
    def put(self) -> Mapping[torch.device, Tensor] | None:
        return None if self.real is None else self._on_devices(self.real)

    def _on_devices(self, values: Ints) -> dict[torch.device, Tensor]:
        host = torch.from_numpy(np.ascontiguousarray(values))
        return {device: host.to(device, non_blocking=True) for device in self.devices}

    @property
    def rows(self) -> int:
        return len(self.ids)

    @property
    def first(self) -> int:
        """The row of the first place, which is never idle."""
        return int(self.ids[0])


@dataclass(frozen=True)
class _Span:
    """Entries `first .. stop` of the pack's rows that are attended together."""

    first: int
    stop: int


@dataclass(frozen=True, kw_only=True)
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
    layout: RowLayout
    devices: Sequence[torch.device]  # of the layers

    @property
    def _limits(self) -> _GroupLimits:
        is_here = any(device.type == "cpu" for device in self.devices)
        return _ON_CPU if is_here else _ON_ACCELERATOR

    @cached_property
    def _offsets(self) -> Ints:
        return np.concatenate(([0], np.cumsum(self.counts)))

    @cached_property
    def _slots(self) -> Ints:
        """[R] that are read for each row: whole quanta, as far as there are slots."""
        padded = -(-self.ends // KV_QUANTUM) * KV_QUANTUM
        slots: Ints = np.minimum(padded, self.layout.reach[self.rows])
        return slots

    def plan(self) -> tuple[RowGroup, ...]:
        spans = self._spans()
        return tuple(self._group(span, sole=len(spans) == 1) for span in spans)

    def _spans(self) -> list[_Span]:
        """Neighbours are attended together as long as padding them to the most queries and the
        longest row costs less than attending apart."""
        layout, limits, counts = self.layout, self._limits, self.counts.tolist()
        starts, reaches = layout.starts[self.rows].tolist(), layout.reach[self.rows].tolist()
        spans: list[_Span] = []
        start, queries, length, readable = 0, 0, 0, 0  # of the span that grows
        for index, (count, slots) in enumerate(zip(counts, self._slots.tolist(), strict=True)):
            if index > start:
                distance, off = divmod(starts[index] - starts[start], layout.stride)
                reach, longest = distance + 1, max(length, slots)
                before = (starts[index - 1] - starts[start]) // layout.stride + 1
                together = reach * (max(queries, count) + READING_QUERIES) * longest
                apart = before * (queries + READING_QUERIES) * length
                apart += (count + READING_QUERIES) * slots
                joins = not off and reach > before and longest <= min(readable, reaches[index])
                joins &= max(count, counts[index - 1]) <= limits.alone
                joins &= reach <= limits.max_idle * (index - start + 1)
                joins &= reach * max(queries, count) * longest <= limits.cells
                if not joins or together > apart + limits.span_pairs:
                    spans.append(_Span(start, index))
                    start, queries, length = index, 0, 0
            readable = reaches[index] if index == start else min(readable, reaches[index])
            queries, length = max(queries, count), max(length, slots)
        return [*spans, _Span(start, len(counts))] if counts else []

    def _group(self, span: _Span, sole: bool) -> RowGroup:
        rows = self.rows[span.first : span.stop]
        counts = self.counts[span.first : span.stop]
        starts, stride = self.layout.starts[rows], self.layout.stride
        place = (starts - starts[0]) // stride
        start, reach, queries = int(starts[0]), int(place[-1] + 1), int(counts.max())
        length = int(self._slots[span.first : span.stop].max())
        own = slice(span.first, span.stop)
        group = partial(
            RowGroup,
            start=start,
            stride=stride,
            queries=queries,
            length=length,
            has_holes=bool((self.ends[own] != self.lengths[own]).any()),
            devices=self.devices,
        )
        if sole and len(rows) == reach and len(self.positions) == reach * queries:
            positions = self.positions.reshape(reach, queries)
            source = np.arange(len(self.positions)).reshape(reach, queries)
            return group(ids=rows, positions=positions, source=source, real=None)
        # Row i's tokens fill the head of its Q queries; the rest repeat its last token.
        which = np.minimum(np.arange(queries), counts[:, None] - 1)  # [R, Q]
        source = self._offsets[span.first : span.stop, None] + which
        positions = np.full((reach, queries), -1, dtype=np.int64)
        take = np.zeros((reach, queries), dtype=np.int64)
        take[place] = source
        positions[place] = self.positions[source]
        real = np.arange(queries) < counts[:, None]
        put = (place[:, None] * queries + np.arange(queries))[real]
        ids = np.full(reach, rows[0])
        ids[place] = rows
        return group(ids=ids, positions=positions, source=take, real=put)
