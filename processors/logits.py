"""Operations on logits before a token is chosen from them: pure functions, row by row.

Scores are [n, V], float64 except for drafts, and changed in place; a column is [n, 1]. Excluded ids
are at -inf, and NaN stays NaN: if any number turns NaN on the way, the row's best score is NaN, so
that the result is not taken for a choice. Nothing here waits for the device.
Semantics: those of `transformers`' processors; presence and frequency penalties as in OpenAI's API.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from processors.token_tree import Ints

_BLOCK = 64  # ids of a block, whose maximum is taken first
_IN_BLOCK = torch.arange(_BLOCK)
_MANY = 2**15  # ids from which on a CPU sorts only those that may stay
# Scores that are processed at once, of 8 bytes each, with a few copies.
_CPU_PART = 2**19  # per thread: what its caches hold; more would allocate memory each time
_DEVICE_PART = 2**25  # beside the models' weights and caches


def parts(count: int, like: Tensor) -> Iterator[slice]:
    """Yield consecutive slices of `count` rows of scores, which are like `like` [..., V].

    A slice has at least one row, on a CPU one for each thread. Without rows there is an empty
    slice.
    """
    size = like.shape[-1]
    if like.device.type == "cpu":
        threads = torch.get_num_threads()
        rows = max(threads, threads * _CPU_PART // size)
    else:
        rows = max(1, _DEVICE_PART // size)
    for start in range(0, max(1, count), rows):
        yield slice(start, min(count, start + rows))


def change_rows(scores: Tensor, which: Sequence[int], change: Callable[[Tensor], None]) -> None:
    """Apply `change`, which works in place, to some of the rows."""
    if len(which) == len(scores):
        change(scores)
    elif len(which) > 0:
        index = on_device(np.array(which, dtype=np.int64), scores.device)
        part = scores.index_select(0, index)
        change(part)
        scores.index_copy_(0, index, part)


def add_entries(scores: Tensor, rows: Ints, ids: Ints, values: Tensor) -> None:
    """Add `values[i]` to the score of `ids[i]` in `rows[i]`; an entry may be repeated."""
    where = (on_device(rows, scores.device), on_device(ids, scores.device))
    scores.index_put_(where, values, accumulate=True)


def penalize(
    scores: Tensor,
    in_prompt: Tensor,
    counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Apply the repetition penalty over prompt and output, then the others over the output.

    `in_prompt` is [n, V] bool, and `counts` [n, V] how often each id is in the output. The
    penalties are columns; 1, 0 and 0 change nothing.
    """
    in_output = counts > 0
    penalized = torch.where(scores < 0, scores * repetition, scores / repetition)
    scores.copy_(torch.where(in_prompt | in_output, penalized, scores))
    scores.sub_(counts * frequency + in_output * presence)


def keep_top_k(scores: Tensor, top_k: Sequence[int]) -> None:
    """Exclude scores below the k-th largest, 1 <= k <= V; ties with it stay."""
    ranks = on_device(np.array(top_k, dtype=np.int64) - 1, scores.device).unsqueeze(1)
    _exclude_below(scores, top(scores, max(top_k))[0].gather(1, ranks))


def keep_top_p(scores: Tensor, top_p: Tensor) -> None:
    """Keep the smallest set of most probable ids that holds `top_p`; the lowest id wins ties.

    Rows with NaN, or with no id left, stay as they are.
    """
    _mark(scores, top_p)
    if scores.device.type == "cpu" and scores.shape[-1] >= _MANY:
        for row, share in zip(scores, top_p[:, 0].tolist(), strict=True):
            _keep_share(row, share)
        return
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1).sub_(probabilities)
    excluded = before >= top_p
    excluded[:, 0] = False
    scores.masked_fill_(torch.zeros_like(excluded).scatter_(1, ids, excluded), -math.inf)


def _keep_share(scores: Tensor, share: float) -> None:
    """Apply `keep_top_p` to one row [V] by sorting only those ids that may stay.

    Ids that each have less than (1 - share) / V of the probability have less than 1 - share of it
    together, so those before them hold `share`. Half of that is used, because sums are rounded.
    """
    probabilities = scores.softmax(dim=-1)
    able = (probabilities >= (1.0 - share) / (2 * len(scores))).nonzero().squeeze(1)
    if not len(able):
        return
    ordered, order = scores[able].sort(descending=True, stable=True)
    ids = able[order]
    own = probabilities[ids]
    stays = own.cumsum(dim=-1).sub_(own) < share
    stays[0] = True
    scores.fill_(-math.inf)
    scores[ids[stays]] = ordered[stays]


def keep_min_p(scores: Tensor, min_p: Tensor) -> None:
    """Keep ids that are at least `min_p` times as probable as the most probable id."""
    _exclude_below(scores, scores.amax(dim=-1, keepdim=True) + min_p.log())


def _exclude_below(scores: Tensor, least: Tensor) -> None:
    """Exclude scores below `least`, a column."""
    scores.masked_fill_(scores < least, -math.inf)
    _mark(scores, least)


def _mark(scores: Tensor, limit: Tensor) -> None:
    """Write NaN into rows with a NaN limit: it is unknown what to exclude there."""
    scores[:, :1].masked_fill_(limit.isnan(), math.nan)


def best(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return columns of the largest score, NaN if there is one, and of the lowest id with it."""
    if not _in_blocks(scores):
        values, ids = scores.max(dim=-1, keepdim=True)
        return values, ids
    maxima, block = _block_maxima(scores).max(dim=-1, keepdim=True)
    values, ids = _candidates(scores, block)
    values, place = values.max(dim=-1, keepdim=True)
    return torch.maximum(values, maxima), ids.gather(1, place)  # equal, unless one is NaN


def top(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the `width` best scores and ids, best first; fewer if there are no more ids.

    Any of ties may be chosen, but in the first place the lowest id. `width` is at least 1.
    """
    if width == 1:
        return best(scores)
    width = min(width, scores.shape[-1])
    if not _in_blocks(scores) or width * _BLOCK >= scores.shape[-1]:
        return _best_first(scores, width)
    # No block beyond the best `width` can hold any of the best `width`.
    maxima, blocks = _best_first(_block_maxima(scores), width)
    found, ids = _candidates(scores, blocks.sort(dim=-1).values)
    values, place = _best_first(found, width)
    # The k-th best score is no less than the k-th best maximum, unless one is NaN.
    return torch.maximum(values, maxima), ids.gather(1, place)


def log_shares(scores: Tensor, values: Tensor, ids: Tensor) -> Tensor:
    """Return the log-softmax [n, k] of scores at `ids`, float64, at most 0.

    `values` are the scores of these ids. The result is -inf for excluded ids, even if all are
    excluded, and NaN where `values` are.
    """
    wide = scores if scores.dtype == torch.float64 else scores.float()
    shares = wide.log_softmax(dim=-1).gather(1, ids)
    return torch.where(values > -math.inf, shares, values).double().clamp_(max=0.0)


def log_total(scores: Tensor) -> Tensor:
    """Return the log of the summed exponentials, a float64 column, of scores in any precision.

    It is 0 if every score is -inf, so that excluded ids have the log-probability -inf there too.
    """
    wide = scores if scores.dtype == torch.float64 else scores.float()
    total = wide.logsumexp(dim=-1, keepdim=True).double()
    return total.masked_fill_(total.isneginf(), 0.0)


def _best_first(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return `topk`, with the lowest id of the largest score in the first place."""
    values, ids = scores.topk(width, dim=-1)
    first = scores.max(dim=-1, keepdim=True).indices
    ids = torch.where(ids == first, ids[:, :1], ids)
    ids[:, :1] = first
    return values, ids


def _in_blocks(scores: Tensor) -> bool:
    """Return whether the best is found faster by maxima of blocks, which a CPU vectorises."""
    return scores.device.type == "cpu" and scores.shape[-1] >= 8 * _BLOCK


def _block_maxima(scores: Tensor) -> Tensor:
    """Return the maximum of each block, [n, ceil(V / _BLOCK)]."""
    blocks = scores.shape[-1] // _BLOCK
    whole = blocks * _BLOCK
    maxima = scores[:, :whole].view(len(scores), blocks, _BLOCK).amax(dim=-1)
    if whole == scores.shape[-1]:
        return maxima
    return torch.cat((maxima, scores[:, whole:].amax(dim=-1, keepdim=True)), dim=1)


def _candidates(scores: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores and ids [n, k * _BLOCK] in `blocks` [n, k].

    Beyond the last id they are -inf and the last id.
    """
    ids = (blocks.unsqueeze(2) * _BLOCK + _IN_BLOCK).flatten(1)
    last = scores.shape[-1] - 1
    if scores.shape[-1] % _BLOCK == 0:
        return scores.gather(1, ids), ids
    known = ids.clamp(max=last)
    return scores.gather(1, known).masked_fill_(ids > last, -math.inf), known


def column(
    values: Sequence[float] | NDArray[np.float64],
    device: torch.device,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Return values as a column, [n, 1]."""
    values = np.array(values, dtype=np.float64).reshape(-1, 1)
    return torch.from_numpy(values).to(device, dtype, non_blocking=True)


def on_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
