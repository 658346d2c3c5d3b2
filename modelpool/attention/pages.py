"""Pages: where paged attention finds a pack's keys, and masks of the slots that a token sees.

Contract: a page is one slot, so an arena is a paged cache without changes. All functions are pure.
Index arrays are on the host and bits on the device, because the paths of a tree may be known only
there; nothing waits for the device. The bits of a row are [tokens, slots], one after the other, the
first in the lowest bit of a byte, and each row begins at a whole byte (`numpy.packbits` with
bitorder "little").
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelpool.attention.kv_view import Ints, PackSlots
from modelpool.attention.path import KeyPaths

Int32s = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class PackRows:
    """The R rows of a pack, on the host; a row may have no tokens.

    The tokens of row r see at most the first `lengths[r]` slots of the row, including their own.
    Without a tree these are in the order of positions, and the last ones are the tokens'; with a
    tree, its `nodes[r]` slots are the last ones.
    """

    counts: Ints  # [R] tokens
    lengths: Ints  # [R]
    nodes: Ints  # [R]
    tables: Int32s  # [R, N] blocks
    block_slots: int

    @classmethod
    def of(cls, pack: PackSlots) -> "PackRows":
        """Return the rows of a pack.

        Each row has at least one token, and its last token has the highest slot of the row.
        """
        slots = pack.slots[np.cumsum(pack.counts) - 1]
        block, place = np.divmod(slots, pack.block_slots)
        lengths = (pack.tables == block[:, None]).argmax(axis=1) * pack.block_slots + place + 1
        nodes = np.zeros_like(lengths)
        if pack.tree is not None:
            nodes = np.maximum(lengths - pack.tree.starts[pack.rows], 0)
        return cls(pack.counts, lengths, nodes, pack.tables, pack.block_slots)


@dataclass(frozen=True, eq=False)
class PageTable:
    """Starts of the rows' queries, pages and bits, and the pages of each row; on the host.

    Attributes:
        query_starts, page_starts: [R + 1].
        pages: [page_starts[R]] slots of the arena.
        last_lengths: [R] slots in use of each row's last page: 1, or 0 if the row has no page.
        mask_starts: [R + 1] in bytes.
    """

    query_starts: Int32s
    page_starts: Int32s
    pages: Int32s
    last_lengths: Int32s
    mask_starts: Int32s

    @classmethod
    def of(cls, rows: PackRows) -> "PageTable":
        page_starts = _starts(rows.lengths)
        own = np.arange(page_starts[-1]) - np.repeat(page_starts[:-1], rows.lengths)
        row = np.repeat(np.arange(len(rows.lengths)), rows.lengths)
        block, place = np.divmod(own, rows.block_slots)
        pages = rows.tables[row, block] * rows.block_slots + place
        return cls(
            _starts(rows.counts),
            page_starts,
            pages.astype(np.int32),
            np.minimum(rows.lengths, 1).astype(np.int32),
            _starts(-(-rows.counts * rows.lengths // 8)),
        )


def is_causal(rows: PackRows, window: int | None) -> bool:
    """Return whether each token sees exactly the slots up to its own, so no mask is needed."""
    return window is None and not rows.nodes.any()


def packed_mask(rows: PackRows, table: PageTable, paths: KeyPaths, window: int | None) -> Tensor:
    """Return a mask of the slots of its row that each token sees.

    Args:
        rows: the rows of the pack.
        table: the pages of `rows`.
        paths: paths of the pack's tokens.
        window: number of positions, including the own one.

    Returns:
        [table.mask_starts[R]] uint8, on the device of `paths`; the padding bits of a row are 0.
    """
    device = paths.positions.device
    numbers = np.zeros((4, len(table.query_starts)), dtype=np.int64)
    numbers[0], numbers[1] = table.mask_starts, table.query_starts
    numbers[2, :-1], numbers[3, :-1] = rows.counts, rows.lengths
    starts, queries, counts, lengths = torch.from_numpy(numbers).to(device, non_blocking=True)
    byte = torch.arange(int(table.mask_starts[-1]), device=device)
    row = torch.searchsorted(starts, byte, right=True) - 1
    place = torch.arange(8, device=device)
    bit = (byte - starts[row]).unsqueeze(1) * 8 + place  # [bytes, 8] of the row's own
    own, length = counts[row].unsqueeze(1), lengths[row].unsqueeze(1)
    query = bit // length
    slot = bit - query * length
    token = queries[row].unsqueeze(1) + torch.minimum(query, own - 1)
    seen = _sees(paths, token, slot, int(rows.nodes.max(initial=0)), window) & (query < own)
    bits: Tensor = seen.to(torch.uint8) << place.to(torch.uint8)
    return bits.sum(dim=1, dtype=torch.uint8)


def _sees(paths: KeyPaths, token: Tensor, slot: Tensor, nodes: int, window: int | None) -> Tensor:
    """Return whether each token sees the slot of its row, for tensors of equal shape."""
    position, tail = paths.positions.long()[token], paths.tails.long()[token]
    # A slot before the row's tree has its own number as its position.
    in_tree = slot >= tail
    step = _steps(paths, nodes)[token, (slot - tail).clamp(0, nodes)]
    held = torch.where(in_tree, torch.where(step < 0, position + 1, tail + step), slot)
    seen = held <= position
    return seen if window is None else seen & (held > position - window)


def _steps(paths: KeyPaths, nodes: int) -> Tensor:
    """Return [T, nodes + 1]: the step of a token's path at which a slot of the tree is, or -1.

    The last column belongs to no slot.
    """
    along = torch.arange(paths.path.shape[1], device=paths.path.device).expand_as(paths.path)
    is_step = along <= (paths.positions - paths.tails).unsqueeze(1)
    where = torch.where(is_step, paths.path, nodes).long()
    none = where.new_full((len(where), nodes + 1), -1)
    return none.scatter_(1, where, along)


def _starts(counts: Ints) -> Int32s:
    """Return [R + 1] offsets for [R] counts: where each begins, and the end of the last."""
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts
