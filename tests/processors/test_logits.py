"""Each change of the logits is that of `transformers`, and touches only the rows it is for."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from processors.logits import (
    best,
    column,
    keep_top_k,
    keep_top_p,
    parts,
    top,
)

HOST = torch.device("cpu")


@settings(deadline=None)
@given(st.integers(0, 5000), st.integers(1, 200_000), st.sampled_from(["cpu", "meta"]))
def test_scores_of_whatever_device_are_worked_on_in_parts_of_bounded_memory(
    count: int, size: int, device: str
) -> None:
    found = list(parts(count, torch.empty((1, size), dtype=torch.bfloat16, device=device)))
    assert [place for part in found for place in range(part.start, part.stop)] == list(range(count))
    threads = torch.get_num_threads() if device == "cpu" else 1
    most = threads * 2**19 if device == "cpu" else 2**25
    assert all((part.stop - part.start) <= max(threads, most // size) for part in found)
    assert len(found) == max(1, -(-count // max(threads, most // size)))


def test_top_p_breaks_ties_to_the_lowest_id() -> None:
    scores = torch.zeros(1, 4, dtype=torch.float64)
    keep_top_p(scores, column([0.5], HOST))
    assert scores[0].isfinite().tolist() == [True, True, False, False]


MANY = 2**15  # ids, from which on only those that may stay are sorted


def sorted_top_p(scores: Tensor, top_p: float) -> Tensor:
    """By a sort of all ids."""
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(dim=-1)
    excluded = probabilities.cumsum(dim=-1) - probabilities >= top_p
    excluded[:, 0] = False
    return scores.masked_fill(excluded.gather(1, ids.argsort(dim=-1)), -math.inf)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    extra=st.integers(0, 300),
    scale=st.sampled_from([0.0, 0.1, 1.0, 4.0, 30.0]),
    decimals=st.sampled_from([0, 1, 9]),
    left=st.sampled_from([1, 2, 50, MANY]),
    top_p=st.one_of(st.floats(0, 0.999999), st.sampled_from([0.5, 0.9, 0.99, 1 - 1e-9])),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_of_many_ids_top_k_and_top_p_keep_what_a_sort_of_all_keeps(
    seed: int, extra: int, scale: float, decimals: int, left: int, top_p: float, dtype: torch.dtype
) -> None:
    drawn = torch.Generator().manual_seed(seed)
    scores = scale * torch.randn(2, MANY + extra, generator=drawn, dtype=torch.float64)
    scores = scores.round(decimals=decimals).to(dtype)  # ties
    limited = scores.clone()
    keep_top_k(limited, [left, min(7, left)])
    for row, rank in zip(range(2), (left, min(7, left)), strict=True):
        least = scores[row].sort(descending=True).values[rank - 1]
        assert torch.equal(limited[row] >= least, scores[row] >= least)
        assert torch.equal(limited[row].isneginf(), scores[row] < least)
    if dtype == torch.float32:  # whose sums of all say where a set of many ends
        return
    wanted = sorted_top_p(limited, top_p)
    keep_top_p(limited, column([top_p] * 2, HOST))
    assert torch.equal(limited, wanted)


@pytest.mark.parametrize("size", [40, 512, 513, 640, 4096, 5001])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_best_are_found_by_way_of_blocks(size: int, dtype: torch.dtype) -> None:
    drawn = torch.Generator().manual_seed(size)
    scores = torch.randn(12, size, generator=drawn, dtype=torch.float64).to(dtype)
    scores[1] = scores[1].round()  # ties
    scores[2] = -math.inf
    scores[3, : size - 1] = -math.inf
    scores[4, -2:] = math.nan
    scores[5] = math.nan
    scores[6, 17] = math.inf
    scores = scores.repeat(1, 2)[:, :size]  # as logits whose padding was cut off
    for width in (1, 2, 4, 7):
        values, ids = top(scores, width)
        wanted = scores.topk(width, dim=-1).values
        assert torch.equal(values.nan_to_num(99.0), wanted.nan_to_num(99.0))
        there = scores.gather(1, ids)
        assert torch.equal(there.nan_to_num(99.0), wanted.nan_to_num(99.0))
        assert torch.equal(ids[:, 0], scores.max(dim=-1).indices)
        finite = torch.tensor([0, 1, 7, 8, 9, 10, 11])
        assert all(len(set(line)) == width for line in ids[finite].tolist())
    values, ids = best(scores)
    found = scores.max(dim=-1, keepdim=True)
    assert torch.equal(ids, found.indices)
    assert torch.equal(values.nan_to_num(99.0), found.values.nan_to_num(99.0))
