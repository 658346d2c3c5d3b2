"""Prefill brings a state up to its tokens in chunks, and a failed chunk costs nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from processors.pack import ActiveModel
from processors.prefill import PrefillProcessor, share_chunk
from processors.token_tree import Ints
from tests.processors.tiny import Bench, FailingModel


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
