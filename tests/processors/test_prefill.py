"""Prefill brings a state up to its tokens in chunks, and a failed chunk costs nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from processors.pack import ActiveModel
from processors.prefill import PrefillProcessor, share_chunk
from processors.token_tree import Ints
from tests.processors.tiny import Bench, FailingModel
from tests.processors.verification import draft


@pytest.mark.parametrize(
    ("wanted", "chunk", "shared"),
    [
        ([5, 3, 2], 100, [5, 3, 2]),
        ([5, 3, 2], 6, [5, 1, 0]),
        ([5, 3, 2], 5, [5, 0, 0]),
        ([0, 8, 0, 8], 10, [0, 8, 0, 2]),
        ([], 10, []),
    ],
)
def test_a_chunk_is_shared_first_come_first_served(
    wanted: list[int], chunk: int, shared: list[int]
) -> None:
    assert share_chunk(np.array(wanted, dtype=np.int64), chunk).tolist() == shared


def read_all(bench: Bench, rows: Ints, chunk: int) -> None:
    """In forwards of `chunk` tokens, first come first served."""
    while (behind := bench.active.lag(rows)).any():
        counts = share_chunk(behind, chunk)
        PrefillProcessor(chunk).feed(bench.active, rows, counts)


@pytest.mark.parametrize("counts", [[19, 1, 4, 0], [3, 0, 2, 0], [7, 1, 0, 0]])
def test_one_forward_reads_so_many_tokens_of_each_row(counts: list[int]) -> None:
    bench = Bench([20, 2, 5, 1])
    rows, fed = np.array([0, 1, 2, 3]), np.array(counts)
    PrefillProcessor(1).feed(bench.active, rows, fed)
    assert bench.state.lengths(rows).tolist() == counts
    bench.manager.check_integrity()


@pytest.mark.parametrize("chunk", [3, 50])
def test_what_was_prefilled_in_chunks_drafts_like_what_was_not(chunk: int) -> None:
    bench = Bench([23, 9, 40])
    rows = np.array([0, 1, 2])
    read_all(bench, rows, chunk)
    result = draft(bench, dict.fromkeys(range(3), 3))
    for row in range(3):
        assert result.tree.tokens[row].tolist() == bench.continuation(row, 3)


def test_the_last_logits_of_a_chunk_are_those_of_a_text_that_is_read_at_once() -> None:
    prefill, rows = PrefillProcessor(100), np.array([0, 1, 2])
    bench, other = Bench([20, 9, 14]), Bench([20, 9, 14])
    whole = prefill.read(other.active, rows, np.array([12, 8, 13]), np.array([3, 1, 1]))
    prefill.feed(bench.active, rows, np.array([5, 0, 2]))
    logits = prefill.feed(bench.active, rows, np.array([7, 8, 0]), np.array([3, 1, 0]))
    torch.testing.assert_close(logits, whole[:4])


def test_a_failed_chunk_leaves_the_state_as_before_it() -> None:
    bench = Bench([20, 6])
    rows, counts = np.array([0, 1]), np.array([5, 3])
    prefill = PrefillProcessor(8)

    def broken() -> ActiveModel:
        return replace(bench.active, model=FailingModel(bench.model, 1))

    with pytest.raises(RuntimeError):
        prefill.feed(broken(), rows, counts)
    assert bench.snapshot() == ([0] * 6, [[]] * 6, [[]] * 6)
    prefill.feed(bench.active, rows, counts)
    with pytest.raises(RuntimeError):
        prefill.feed(broken(), rows, counts)
    assert bench.state.lengths(rows).tolist() == [5, 3]
    bench.manager.check_integrity()
    read_all(bench, rows, 8)
    assert bench.state.lengths(rows).tolist() == [19, 5]
