"""What is done to logits before a token is chosen from them. Pure functions, row by row.

Scores are [n, V] float64 and changed in place; a column is [n, 1]. What is excluded is at -inf, and
NaN stays NaN. Nothing here waits for the device.
Semantics: those of `transformers`' processors; presence and frequency penalties as in OpenAI's API.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]

NO_TOKEN = -1  # fills short texts and short patterns


def change_rows(scores: Tensor, which: Sequence[int], change: Callable[[Tensor], None]) -> None:
    """Runs `change`, which works in place, on some of the rows."""
    if len(which) == len(scores):
        change(scores)
    elif len(which) > 0:
        index = on_device(np.array(which, dtype=np.int64), scores.device)
        part = scores.index_select(0, index)
        change(part)
        scores.index_copy_(0, index, part)


def add_entries(scores: Tensor, rows: Ints, ids: Ints, values: Tensor) -> None:
    """Adds `values[i]` to the score of `ids[i]` in `rows[i]`; an entry may come several times."""
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
    """The repetition penalty, over prompt and output; then presence and frequency, over the output.

    Args:
        in_prompt, counts: [n, V] bool, and how often each id stands in the output.
        repetition, presence, frequency: columns; 1, 0 and 0 change nothing.
    """
    in_output = counts > 0
    penalized = torch.where(scores < 0, scores * repetition, scores / repetition)
    scores.copy_(torch.where(in_prompt | in_output, penalized, scores))
    scores.sub_(counts * frequency + in_output * presence)


def ends_with(texts: Tensor, patterns: Tensor) -> Tensor:
    """Whether each text ends with its pattern, [n]; both [n, L], `NO_TOKEN` in front."""
    return ((texts == patterns) | (patterns == NO_TOKEN)).all(dim=-1)


def keep_top_k(scores: Tensor, top_k: Sequence[int]) -> None:
    """Excludes what is below the k-th largest, 1 <= k <= V; ties with it stay."""
    ranks = on_device(np.array(top_k, dtype=np.int64) - 1, scores.device).unsqueeze(1)
    threshold = scores.topk(max(top_k), dim=-1).values.gather(1, ranks)
    scores.masked_fill_(scores < threshold, -math.inf)


def keep_top_p(scores: Tensor, top_p: Tensor) -> None:
    """Keeps the smallest set of most probable ids that holds `top_p`; ties to the lowest id."""
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1).sub_(probabilities)
    excluded = before >= top_p
    excluded[:, 0] = False
    scores.masked_fill_(torch.zeros_like(excluded).scatter_(1, ids, excluded), -math.inf)


def keep_min_p(scores: Tensor, min_p: Tensor) -> None:
    """Keeps what is at least `min_p` times as probable as the most probable id."""
    least = scores.amax(dim=-1, keepdim=True) + min_p.log()
    scores.masked_fill_(scores < least, -math.inf)


def log_total(scores: Tensor) -> Tensor:
    """The log of the summed exponentials, a float64 column, of scores in any precision.

    0 where every score is -inf: what is excluded has the log-probability -inf there too.
    """
    wide = scores if scores.dtype == torch.float64 else scores.float()
    total = wide.logsumexp(dim=-1, keepdim=True).double()
    return total.masked_fill_(total.isneginf(), 0.0)


def column(values: Sequence[float], device: torch.device) -> Tensor:
    """[n, 1] float64."""
    return on_device(np.array(values, dtype=np.float64), device).unsqueeze(1)


def on_device(array: NDArray[np.int64] | NDArray[np.float64], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
