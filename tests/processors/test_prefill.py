"""Prefill brings a state up to its tokens in chunks, and a failed chunk costs nothing."""

import numpy as np
import pytest

from processors.draft import DraftProcessor
from processors.prefill import PrefillProcessor, share_chunk
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


@pytest.mark.parametrize("chunk", [1, 4, 7, 1000])
@pytest.mark.parametrize("leave", [0, 3])
def test_every_row_lags_by_no_more_than_was_left(chunk: int, leave: int) -> None:
    bench = Bench([20, 2, 5, 1])
    rows = np.array([0, 1, 2, 3])
    PrefillProcessor(chunk).catch_up(bench.model, bench.state, bench.manager, rows, leave)
    lags = bench.manager.counts - 1 - bench.state.lengths(np.arange(6))
    assert np.all(lags[:4] <= leave)
    assert np.all(lags[:4] >= 0)
    bench.manager.check_integrity()


@pytest.mark.parametrize("chunk", [3, 50])
def test_what_was_prefilled_in_chunks_drafts_like_what_was_not(chunk: int) -> None:
    bench = Bench([23, 9, 40])
    rows = np.array([0, 1, 2])
    PrefillProcessor(chunk).catch_up(bench.model, bench.state, bench.manager, rows, leave=0)
    result = DraftProcessor().draft(
        bench.model,
        bench.state,
        bench.manager,
        bench.sampler,
        rows,
        np.zeros(3, dtype=int),
        np.full(3, 3),
        width=1,
    )
    for row in range(3):
        assert result.tree.tokens[row].tolist() == bench.continuation(row, 3)


def test_a_failed_chunk_leaves_the_state_as_before_it() -> None:
    bench = Bench([20, 6])
    rows = np.array([0, 1])
    prefill = PrefillProcessor(chunk=8)
    with pytest.raises(RuntimeError):
        prefill.catch_up(FailingModel(bench.model, 1), bench.state, bench.manager, rows, 0)
    assert bench.snapshot() == ([0] * 6, [[]] * 6, [[]] * 6)
    with pytest.raises(RuntimeError):
        prefill.catch_up(FailingModel(bench.model, 3), bench.state, bench.manager, rows, 0)
    assert bench.state.lengths(rows).tolist() == [16, 0]
    bench.manager.check_integrity()
    assert bench.holds_numbers
    prefill.catch_up(bench.model, bench.state, bench.manager, rows, 0)
    assert bench.state.lengths(rows).tolist() == [19, 5]
