"""Path attention in Triton, for CUDA: see `modelpool.attention.path` for the definition.

There are two kernels. In `partial_sums`, a program processes one token, one split of its keys and
one KV head; its rows are the query heads that share that head, padded to 16, the minimum for a
matrix product. `joined_sums` adds a token's splits, first to last. Splits and blocks begin at fixed
positions, so the bits of a token depend only on its own keys in their order. Keys that a token does
not see are not loaded, so they may be NaN.

Compiled for sm_80 and sm_90; tested with Triton's interpreter and on an H200.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelpool.attention.kv_view import Attention, AttentionLayer
from modelpool.attention.path import KeyPaths, PathAttention

SPLIT = 256  # keys of a program: a constant, because the bits of a text depend on it
_ROWS = 16  # the minimum for a matrix product
# Bytes of keys in one product, by the bytes of a number: with more, registers spill to memory.
_BLOCK_BYTES = {2: 2**14, 4: 2**13}


# Arguments that change from pack to pack: their values cause no new compilation of a kernel.
_OF_A_PACK = ["path_token", "table_row", "splits"]
_ARRAYS = ["rows", "positions", "tails", "path", "tables"]


def triton_attention() -> Attention:
    return PathAttention(path_attention)


def path_attention(
    query: Tensor, keys: Tensor, values: Tensor, paths: KeyPaths, settings: AttentionLayer
) -> Tensor:
    """Compute `modelpool.attention.path.reference` on the device, with sums in float32.

    Args:
        query: [rows, heads, head_dim], the last dimension contiguous; float32, float16 or bfloat16.
            The first T rows are the tokens'; the others are not read. As many rows are returned.
        keys: [slots, kv_heads, head_dim].
        values: as `keys`, with equal strides.
        paths: places of the tokens' keys.
        settings: settings of the layer.
    """
    (rows, heads, dim), tokens = query.shape, len(paths.positions)
    group, kv_heads = heads // keys.shape[1], keys.shape[1]
    splits = triton.cdiv(paths.longest, SPLIT)
    sums = query.new_empty((tokens, heads, splits, dim), dtype=torch.float32)
    peaks, totals = (
        query.new_empty((tokens, heads, splits), dtype=torch.float32) for _ in range(2)
    )
    out = query.new_empty((rows, heads, dim))
    assert keys.stride() == values.stride(), "keys and values lie alike"
    assert query.stride(2) == keys.stride(2) == 1, "a head's numbers are contiguous"
    window, softcap, sinks = settings.window or 0, settings.softcap or 0.0, settings.sinks
    with torch.cuda.device_of(query):  # Triton launches on the current device
        partial_sums[(tokens, splits, kv_heads)](
            query, keys, values, paths.rows, paths.positions, paths.tails, paths.path, paths.tables,
            sums, peaks, totals, settings.scale, softcap,
            query.stride(0), query.stride(1), keys.stride(0), keys.stride(1),
            paths.path.stride(0), paths.tables.stride(0), splits,
            HEADS=heads, GROUP=group, ROWS=max(_ROWS, triton.next_power_of_2(group)), DIM=dim,
            BLOCK=block_of(dim, query.dtype), SPLIT=SPLIT, WINDOW=window, IS_CAPPED=softcap > 0,
            BLOCK_SLOTS=paths.block_slots,
            # The interpreter multiplies the bit patterns of bfloat16 (triton#11584).
            IN_FLOAT32=query.dtype == torch.bfloat16 and query.device.type == "cpu",
        )  # fmt: skip
        joined_sums[(tokens, heads)](
            sums, peaks, totals, peaks if sinks is None else sinks, out, paths.positions,
            splits, HEADS=heads, DIM=dim, SPLIT=SPLIT, WINDOW=window, HAS_SINKS=sinks is not None,
        )  # fmt: skip
    return out


def block_of(dim: int, dtype: torch.dtype) -> int:
    """Return the number of keys in a matrix product, 16 to 64."""
    return max(16, min(64, _BLOCK_BYTES[dtype.itemsize] // (dim * dtype.itemsize)))


@triton.jit(do_not_specialize=_OF_A_PACK, do_not_specialize_on_alignment=_ARRAYS)
def partial_sums(
    query, keys, values, rows, positions, tails, path, tables, sums, peaks, totals,
    scale, softcap, query_token, query_head, kv_slot, kv_head, path_token, table_row, splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, IS_CAPPED: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr, IN_FLOAT32: tl.constexpr,
):  # fmt: skip
    """Compute the weighted sum, largest score and total weight of one split of a token's keys."""
    token, split, kv = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + token)
    begin = _first_seen(position, WINDOW)
    low = tl.maximum(split * SPLIT, begin // BLOCK * BLOCK)
    high = tl.minimum(split * SPLIT + SPLIT, position + 1)
    if low >= high:
        return
    tail, row, dim = tl.load(tails + token), tl.arange(0, ROWS), tl.arange(0, DIM)
    is_head = row < GROUP
    head = kv * GROUP + tl.where(is_head, row, 0)
    own = query + token.to(tl.int64) * query_token
    own = tl.load(own + (head[:, None] * query_head + dim[None, :]), is_head[:, None], 0.0)
    table = tables + tl.load(rows + token) * table_row
    keys, values = keys + kv * kv_head, values + kv * kv_head
    peak, total = tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, DIM], tl.float32)
    for start in range(low, high, BLOCK):
        key = start + tl.arange(0, BLOCK)
        seen = (key >= begin) & (key < high)
        slot = _slot(path + token * path_token, table, key, tail, seen, BLOCK_SLOTS)
        part = tl.load(keys + (slot[None, :] * kv_slot + dim[:, None]), seen[None, :], 0.0)
        scores = _scores(own, part, seen, scale, softcap, IS_CAPPED, IN_FLOAT32)
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights, kept = tl.exp(scores - higher[:, None]), tl.exp(peak - higher)
        part = tl.load(values + (slot[:, None] * kv_slot + dim[None, :]), seen[:, None], 0.0)
        found = found * kept[:, None] + _product(weights.to(part.dtype), part, IN_FLOAT32)
        total, peak = total * kept + tl.sum(weights, 1), higher
    to, own = token.to(tl.int64) * HEADS * splits + split, head * splits
    tl.store(peaks + to + own, peak, mask=is_head)
    tl.store(totals + to + own, total, mask=is_head)
    tl.store(sums + to * DIM + (own[:, None] * DIM + dim[None, :]), found, is_head[:, None])


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["positions"])
def joined_sums(
    sums, peaks, totals, sinks, out, positions, splits,
    HEADS: tl.constexpr, DIM: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Compute the output of one token and head from its splits, in their order."""
    token, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + token)
    dim = tl.arange(0, DIM)
    place = token.to(tl.int64) * HEADS + head
    peak, total = -float("inf"), 0.0
    found = tl.zeros([DIM], tl.float32)
    for split in range(_first_seen(position, WINDOW) // SPLIT, position // SPLIT + 1):
        own = place * splits + split
        own_peak = tl.load(peaks + own)
        higher = tl.maximum(peak, own_peak)
        kept, added = tl.exp(peak - higher), tl.exp(own_peak - higher)
        found = found * kept + added * tl.load(sums + own * DIM + dim)
        total = total * kept + added * tl.load(totals + own)
        peak = higher
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        higher = tl.maximum(peak, sink)
        kept = tl.exp(peak - higher)
        found, total = found * kept, total * kept + tl.exp(sink - higher)
    tl.store(out + place * DIM + dim, (found / total).to(out.dtype.element_ty))


@triton.jit
def _first_seen(position, WINDOW: tl.constexpr):
    """Return the first position that a token attends to; WINDOW is 0 if there is none."""
    if WINDOW > 0:
        return tl.maximum(position + 1 - WINDOW, 0)
    else:  # noqa: RET505 (Triton compiles one of the branches)
        return position * 0


@triton.jit
def _slot(path, table, key, tail, seen, BLOCK_SLOTS: tl.constexpr):
    """Return each key's slot in the arena, in 64 bits: it is multiplied by the size of a slot."""
    on_path = seen & (key >= tail)
    step = tl.load(path + (key - tail), mask=on_path, other=0)
    slot = tl.where(on_path, tail + step, key)
    block = tl.load(table + slot // BLOCK_SLOTS, mask=seen, other=0)
    return block.to(tl.int64) * BLOCK_SLOTS + slot % BLOCK_SLOTS


@triton.jit
def _scores(own, keys, seen, scale, cap, IS_CAPPED: tl.constexpr, IN_FLOAT32: tl.constexpr):
    scores = _product(own, keys, IN_FLOAT32) * scale
    if IS_CAPPED:
        scores = _capped(scores, cap)
    return tl.where(seen[None, :], scores, -float("inf"))


@triton.jit
def _product(left, right, IN_FLOAT32: tl.constexpr):
    if IN_FLOAT32:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _capped(scores, cap):
    """Return cap * tanh(scores / cap), by its series where exponentials would cancel out."""
    x = scores / cap
    e = tl.exp(-2.0 * tl.abs(x))
    y = x * x
    small = 1.0 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835))))
    far = (1.0 - e) / (1.0 + e)
    return cap * tl.where(y < 0.0625, x * small, tl.where(x < 0, -far, far))
