"""Triton kernels for noise and choice on CUDA, which do not store the scores of a pack.

Contract: the noise is that of `processors.noise.gumbel`: Philox 4x64-10 keyed by (seed, stream),
counter (1 + id // 4, position, 0, 0), word id % 4. Its integers are numpy's; the logarithms of two
libraries may differ in the last bit, 1e-15. A score is `logits / temperature + noise` in float64,
at temperature 0 the logits. `block_best` finds the best few of a block of ids, `joined_best` the
best of all blocks, `scores_at` the scores of single ids. Ties go to the lowest id; a row that holds
NaN has the first NaN as its best.

Compiled for sm_80 and sm_90; tested by Triton's interpreter and on an H200.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_IDS = 1024  # per program
_ASKED = 128  # single ids per program
_NO_ID = tl.constexpr(2**30)


@dataclass(frozen=True, eq=False)
class NoiseKeys:
    """Keys of the noise at n places, on the device."""

    numbers: Tensor  # [3, n] int64: the bits of seed, stream and position
    temperatures: Tensor  # [n] float64; 0: no noise


@dataclass(frozen=True, eq=False)
class Best:
    """The best ids at n places, best first."""

    ids: Tensor  # [n, w] int64
    scores: Tensor  # [n, w] float64; all NaN where the logits hold NaN
    totals: Tensor  # [n] float64: the log of the summed exponentials of all scores; NaN likewise


def best_of(logits: Tensor, keys: NoiseKeys, width: int, rows: int = 1, ids: int = _IDS) -> Best:
    """Return the `width` best ids of each place, 1 <= width <= V.

    `logits` are [n, V], with contiguous ids. Equal scores come in the order of ids. `rows` and
    `ids` are places and ids per program; they change results by rounding only.
    """
    count, size = logits.shape
    # Each width is compiled by itself, which takes a second, so few are used.
    wanted, width = width, triton.next_power_of_2(width)
    ids = max(ids, width)
    blocks = triton.cdiv(size, ids)
    peaks, sums = (  # each begins at a multiple of 16 bytes, or kernels would be compiled again
        logits.new_empty((count, blocks, width), dtype=torch.float64) for _ in range(2)
    )
    found = logits.new_empty((count, blocks, width), dtype=torch.int32)
    first_nan = logits.new_empty((count, blocks), dtype=torch.int32)
    scores = logits.new_empty((count, width), dtype=torch.float64)
    chosen = logits.new_empty((count, width), dtype=torch.int64)
    totals = logits.new_empty((count,), dtype=torch.float64)
    if count:
        block_best[(triton.cdiv(count, rows), blocks)](
            logits, keys.numbers, keys.temperatures, peaks, sums, found, first_nan,
            logits.stride(0), count, size, blocks, WIDTH=width, ROWS=rows, IDS=ids,
        )  # fmt: skip
        joined_best[(triton.cdiv(count, rows),)](
            peaks, sums, found, first_nan, scores, chosen, totals, count, blocks,
            WIDTH=width, ROWS=rows, BLOCKS=triton.next_power_of_2(blocks),
            CANDIDATES=triton.next_power_of_2(blocks * width),
        )  # fmt: skip
    return Best(chosen[:, :wanted].contiguous(), scores[:, :wanted].contiguous(), totals)


def scores_of(logits: Tensor, keys: NoiseKeys, places: Tensor, tokens: Tensor) -> Tensor:
    """Return the scores [m], float64, of `tokens` [m] at `places` [m]; -inf for unknown ids."""
    out = logits.new_empty((len(tokens),), dtype=torch.float64)
    if len(tokens):
        count, size = logits.shape
        scores_at[(triton.cdiv(len(tokens), _ASKED),)](
            logits, keys.numbers, keys.temperatures, places, tokens, out,
            logits.stride(0), count, size, len(tokens), ASKED=_ASKED,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["count"])
def block_best(
    logits, numbers, temperatures, scores, sums, found, first_nan,
    logit_row, count, size, blocks,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """Find the best, the summed exponentials and the first NaN of a block, for some places."""
    row, block = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    is_row = row < count
    ids = block * IDS + tl.arange(0, IDS)
    known = is_row[:, None] & (ids < size)[None, :]
    temperature = tl.load(temperatures + row, mask=is_row, other=0.0)
    place = row.to(tl.int64)[:, None] * logit_row + ids[None, :]
    # Places without an id have the worst score, and come after all ids.
    value = tl.load(logits + place, mask=known, other=-float("inf")).to(tl.float64)
    quads = block * (IDS // 4) + tl.arange(0, IDS // 4)
    w0, w1, w2, w3 = _words(numbers, row, is_row, count, quads)
    bits = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    score = _score(value, temperature[:, None], bits)
    is_nan = score != score
    where = row.to(tl.int64) * blocks + block
    broken = tl.min(tl.where(is_nan & known, ids[None, :], _NO_ID), 1)
    tl.store(first_nan + where, broken, mask=is_row)
    left = tl.where(is_nan, float("inf"), score)
    top = tl.max(left, 1)
    base = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    total = tl.sum(tl.exp(left - base[:, None]), 1)
    tl.store(sums + where * WIDTH, total, mask=is_row)
    alive = tl.full([ROWS, IDS], 1, tl.int1)
    for rank in tl.static_range(WIDTH):
        top = tl.max(tl.where(alive, left, -float("inf")), 1)
        equal = alive & (left == top[:, None])
        best = tl.min(tl.where(equal, ids[None, :], _NO_ID), 1)
        tl.store(scores + where * WIDTH + rank, top, mask=is_row)
        tl.store(found + where * WIDTH + rank, best, mask=is_row)
        alive = alive & (ids[None, :] != best[:, None])


@triton.jit(do_not_specialize=["count"])
def joined_best(
    scores, sums, found, first_nan, best_scores, best_ids, totals, count, blocks,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Find the best of all blocks, and the total, for some places."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row, start = row < count, row.to(tl.int64) * blocks
    block = tl.arange(0, BLOCKS)
    is_block = is_row[:, None] & (block < blocks)[None, :]
    where = start[:, None] + block[None, :]
    broken = tl.min(tl.load(first_nan + where, mask=is_block, other=_NO_ID), 1)
    is_broken = broken < _NO_ID
    peaks = tl.load(scores + where * WIDTH, mask=is_block, other=-float("inf"))
    bases = tl.where(tl.abs(peaks) == float("inf"), 0.0, peaks)
    own = tl.load(sums + where * WIDTH, mask=is_block, other=0.0)
    top = tl.max(tl.where(own > 0.0, bases, -float("inf")), 1)
    top = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    total = tl.sum(tl.where(own > 0.0, own * tl.exp(bases - top[:, None]), 0.0), 1)
    nothing = float("nan")
    tl.store(totals + row, tl.where(is_broken, nothing, top + tl.log(total)), mask=is_row)
    one = tl.arange(0, CANDIDATES)
    alive = is_row[:, None] & (one < blocks * WIDTH)[None, :]
    where = start[:, None] * WIDTH + one[None, :]
    left = tl.load(scores + where, mask=alive, other=-float("inf"))
    ids = tl.load(found + where, mask=alive, other=_NO_ID)
    for rank in tl.static_range(WIDTH):
        top = tl.max(tl.where(alive, left, -float("inf")), 1)
        best = tl.min(tl.where(alive & (left == top[:, None]), ids, _NO_ID), 1)
        to = row.to(tl.int64) * WIDTH + rank
        chosen = tl.where(is_broken, broken, best) if rank == 0 else best
        tl.store(best_scores + to, tl.where(is_broken, nothing, top), mask=is_row)
        tl.store(best_ids + to, chosen.to(tl.int64), mask=is_row)
        alive = alive & (ids != best[:, None])


@triton.jit(do_not_specialize=["count", "asked"])
def scores_at(
    logits, numbers, temperatures, places, tokens, out, logit_row, count, size, asked,
    ASKED: tl.constexpr,
):  # fmt: skip
    """Compute the scores of single ids."""
    one = tl.program_id(0) * ASKED + tl.arange(0, ASKED)
    is_asked = one < asked
    row, token = tl.load(places + one, is_asked, 0), tl.load(tokens + one, is_asked, -1)
    known = is_asked & (token >= 0) & (token < size)
    value = tl.load(logits + row * logit_row + token, known, -float("inf")).to(tl.float64)
    temperature = tl.load(temperatures + row, is_asked, 0.0)
    quads = tl.where(known, token, 0)
    w0, w1, w2, w3 = _words(numbers, row, is_asked, count, (quads // 4)[:, None])
    bits = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(ASKED, 4)
    mine = tl.arange(0, 4)[None, :] == (quads % 4)[:, None]
    word = tl.sum(tl.where(mine, bits, 0), 1)
    score = _score(value, temperature, word)
    tl.store(out + one, tl.where(known, score, -float("inf")), mask=is_asked)


@triton.jit
def _score(value, temperature, bits):
    """Return float64 scores from float64 logits: the logits at temperature 0, NaN for NaN."""
    uniform = (bits >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2^-53
    uniform = tl.maximum(uniform, 5.551115123125783e-17)  # 2^-54
    noise = -tl.log(-tl.log(uniform))
    is_greedy = temperature == 0.0
    return tl.where(is_greedy, value, value / tl.where(is_greedy, 1.0, temperature) + noise)


@triton.jit
def _words(numbers, row, is_row, count, quads):
    """Return four words for each of `quads`: Philox 4x64-10, with numpy's keys and counters."""
    seed, stream = _number(numbers, 0, row, is_row, count), _number(numbers, 1, row, is_row, count)
    position = _number(numbers, 2, row, is_row, count)
    c0 = (quads + 1).to(tl.uint64)
    if len(quads.shape) == 1:
        c0 = c0[None, :]
    zero = seed[:, None] * 0 + c0 * 0
    c0, c1, c2, c3 = c0 + zero, position[:, None] + zero, zero, zero
    k0, k1 = seed[:, None] + zero, stream[:, None] + zero
    m0, m1 = _constant(0xD2E7470EE14C6C93) + zero, _constant(0xCA5A826395121157) + zero
    w0, w1 = _constant(0x9E3779B97F4A7C15), _constant(0xBB67AE8584CAA73B)
    for _ in tl.static_range(10):
        h0, h1 = tl.umulhi(c0, m0), tl.umulhi(c2, m1)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, c2 * m1, h0 ^ c3 ^ k1, c0 * m0
        k0, k1 = k0 + w0, k1 + w1
    return c0, c1, c2, c3


@triton.jit
def _constant(value: tl.constexpr):
    return tl.full([1, 1], value, tl.uint64)


@triton.jit
def _number(numbers, which: tl.constexpr, row, is_row, count):
    return tl.load(numbers + which * count + row, mask=is_row, other=0).to(tl.uint64)
