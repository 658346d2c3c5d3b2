"""RowGroup: rows of a pack that are attended together, and the plan of such groups.

Groups are padded to the most queries that any of their rows has, as far as that costs less than to
attend apart: on a CPU long prefill chunks are alone. KV lengths are padded to a multiple of
`PackSlots.quantum`, masked: attention kernels then give a query the same bits whatever is computed
beside it. Rows stand in one group where their extents begin at multiples of one distance
(`PackSlots.stride`); the places between that have none of the pack's rows are idle.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from modelpool.attention.backend import READING_QUERIES
from modelpool.attention.kv_view import Ints, KVView, PackSlots


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


class _OnDevices(dict[torch.device, Tensor]):
    """An index on each device that asks for it."""

    def __init__(self, values: Ints) -> None:
        super().__init__()
        self._host = torch.from_numpy(np.ascontiguousarray(values))

    def __missing__(self, device: torch.device) -> Tensor:
        self[device] = self._host.to(device, non_blocking=True)
        return self[device]


@dataclass(frozen=True, eq=False, kw_only=True)
class RowGroup:
    """B places attended together, in one kernel call, Q queries each.

    The groups of a pack stand in its order, and their tokens are all of it.
    """

    ids: Ints  # [B] the row of each place; of an idle one any
    start: int  # flat slot of the first place
    stride: int  # slots from one place to the next
    queries: int
    length: int  # S, slots read
    positions: Ints  # [B, Q] of the queries; -1 for an idle row, which attends to slot 0
    has_holes: bool  # invalid slots among those in use, in any of the rows that are not idle
    source: Ints  # [B, Q] where the queries stand in the pack; 0 for idle rows
    real: Ints | None  # [n] of B * Q, the group's tokens; None: the pack as it stands

    @cached_property
    def take(self) -> Mapping[torch.device, Tensor] | None:
        """[B * Q] pack index; None: the pack as it stands."""
        return None if self.real is None else _OnDevices(self.source.reshape(-1))

    @cached_property
    def put(self) -> Mapping[torch.device, Tensor] | None:
        """[n] index into B * Q of the group's real tokens."""
        return None if self.real is None else _OnDevices(self.real)

    @property
    def rows(self) -> int:
        return len(self.ids)

    @property
    def first(self) -> int:
        """The row of the first place, which is never idle."""
        return int(self.ids[0])


@dataclass(frozen=True)
class GroupPlanner:
    """Splits a pack into row groups."""

    pack: PackSlots

    @property
    def _limits(self) -> _GroupLimits:
        is_here = any(device.type == "cpu" for device in self.pack.devices)
        return _ON_CPU if is_here else _ON_ACCELERATOR

    @cached_property
    def _offsets(self) -> Ints:
        return np.concatenate(([0], np.cumsum(self.pack.counts)))

    @cached_property
    def _slots(self) -> Ints:
        """[R] that are read for each row: whole quanta, as far as there are slots."""
        return slots_read(self.pack)

    def plan(self) -> tuple[RowGroup, ...]:
        spans = self._spans()
        return tuple(self._group(span, sole=len(spans) == 1) for span in spans)

    def _spans(self) -> list[slice]:
        """Of the pack's rows, those that are attended together: neighbours as long as padding them
        to the most queries and the longest row costs less than attending apart."""
        pack, limits, counts = self.pack, self._limits, self.pack.counts.tolist()
        starts, reaches = pack.firsts.tolist(), pack.reach.tolist()
        spans: list[slice] = []
        start, queries, length, readable = 0, 0, 0, 0  # of the span that grows
        for index, (count, slots) in enumerate(zip(counts, self._slots.tolist(), strict=True)):
            if index > start:
                distance, off = divmod(starts[index] - starts[start], pack.stride)
                reach, longest = distance + 1, max(length, slots)
                before = (starts[index - 1] - starts[start]) // pack.stride + 1
                together = reach * (max(queries, count) + READING_QUERIES) * longest
                apart = before * (queries + READING_QUERIES) * length
                apart += (count + READING_QUERIES) * slots
                joins = not off and reach > before and longest <= min(readable, reaches[index])
                joins &= max(count, counts[index - 1]) <= limits.alone
                joins &= reach <= limits.max_idle * (index - start + 1)
                joins &= reach * max(queries, count) * longest <= limits.cells
                if not joins or together > apart + limits.span_pairs:
                    spans.append(slice(start, index))
                    start, queries, length = index, 0, 0
            readable = reaches[index] if index == start else min(readable, reaches[index])
            queries, length = max(queries, count), max(length, slots)
        return [*spans, slice(start, len(counts))] if counts else []

    def _group(self, own: slice, sole: bool) -> RowGroup:
        pack = self.pack
        rows, counts = pack.rows[own], pack.counts[own]
        starts, stride = pack.firsts[own], pack.stride
        place = (starts - starts[0]) // stride
        start, reach, queries = int(starts[0]), int(place[-1] + 1), int(counts.max())
        length = int(self._slots[own].max())
        group = partial(
            RowGroup,
            start=start,
            stride=stride,
            queries=queries,
            length=length,
            has_holes=bool((pack.ends[own] != pack.lengths[own]).any()),
        )
        if sole and len(rows) == reach and len(pack.positions) == reach * queries:
            positions = pack.positions.reshape(reach, queries)
            source = np.arange(len(pack.positions)).reshape(reach, queries)
            return group(ids=rows, positions=positions, source=source, real=None)
        # Row i's tokens fill the head of its Q queries; the rest repeat its last token.
        which = np.minimum(np.arange(queries), counts[:, None] - 1)  # [R, Q]
        source = self._offsets[own, None] + which
        positions = np.full((reach, queries), -1, dtype=np.int64)
        take = np.zeros((reach, queries), dtype=np.int64)
        take[place] = source
        positions[place] = pack.positions[source]
        real = np.arange(queries) < counts[:, None]
        put = (place[:, None] * queries + np.arange(queries))[real]
        ids = np.full(reach, rows[0])
        ids[place] = rows
        return group(ids=ids, positions=positions, source=take, real=put)


def slots_read(pack: PackSlots) -> Ints:
    """[R] that are read of each row: whole quanta, as far as there are slots."""
    slots: Ints = np.minimum(-(-pack.ends // pack.quantum) * pack.quantum, pack.reach)
    return slots


def pairs_by_row(view: KVView) -> float:
    """`Attention.attended` of kernels that pad nothing but the slots of each row."""
    pack = view.pack
    return float(((pack.counts + READING_QUERIES) * slots_read(pack)).sum())
