"""Drafting proposes what stepwise ordinary forwards and the sampler would say."""

import numpy as np
import pytest
import torch

from processors.draft import DraftProcessor
from processors.rollback import RollbackProcessor
from processors.sampler import SamplingSettings
from tests.processors.tiny import GREEDY, MAX_TOKENS, WARM, Bench, FailingModel


@pytest.mark.parametrize("settings", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_draft_is_the_models_own_continuation(settings: SamplingSettings, depth: int) -> None:
    bench = Bench([7, 1, 20, 3], settings)
    rows = np.array([0, 1, 2, 3])
    result = DraftProcessor().draft(
        bench.model,
        bench.state,
        bench.manager,
        bench.sampler,
        rows,
        bench.output_positions(rows),
        np.full(4, depth),
    )
    for row in range(4):
        assert result.tree.tokens[row].tolist() == bench.continuation(row, depth)
    assert result.tree.sizes.tolist() == [depth] * 4
    assert result.flat_slots.shape == (4, depth - 1)


def test_a_draft_gives_the_logits_that_it_was_chosen_from() -> None:
    bench = Bench([7, 12])
    rows = np.array([0, 1])
    result = DraftProcessor().draft(
        bench.model,
        bench.state,
        bench.manager,
        bench.sampler,
        rows,
        np.array([0, 0]),
        np.array([3, 3]),
    )
    for row in range(2):
        text = bench.prompts[row] + result.tree.tokens[row].tolist()
        wanted = bench.logits(text)[len(bench.prompts[row]) - 1 : -1]
        got = torch.stack([logits[row] for logits in result.logits])
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


def test_rows_draft_as_deep_as_each_may() -> None:
    bench = Bench([7, 12, 3])
    rows, sizes = np.array([0, 1, 2]), np.array([1, 4, 2])
    result = DraftProcessor().draft(
        bench.model, bench.state, bench.manager, bench.sampler, rows, np.array([0, 0, 0]), sizes
    )
    for row, size in enumerate(sizes.tolist()):
        assert result.tree.tokens[row, :size].tolist() == bench.continuation(row, size)
        text = bench.prompts[row] + result.tree.tokens[row, :size].tolist()
        wanted = bench.logits(text)[len(bench.prompts[row]) - 1 : -1]
        got = torch.stack([result.logits[d][result.places[d][row]] for d in range(size)])
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)
    assert ((result.flat_slots >= 0).sum(axis=1) == sizes - 1).all()


def test_a_draft_goes_on_behind_what_was_committed_and_rolled_back() -> None:
    bench = Bench([5, 9, 4], WARM)
    rows = np.array([0, 2])
    for committed in ([3, 4], [5], [6, 7, 8]):
        result = DraftProcessor().draft(
            bench.model,
            bench.state,
            bench.manager,
            bench.sampler,
            rows,
            bench.output_positions(rows),
            np.array([4, 4]),
        )
        for index, row in enumerate(rows.tolist()):
            assert result.tree.tokens[index].tolist() == bench.continuation(row, 4)
            bench.manager.extend(row, np.array(committed))
        RollbackProcessor().rollback(bench.state, bench.manager, rows)
        bench.manager.check_integrity()


@pytest.mark.parametrize("fails_at", [1, 2, 4])
def test_a_failed_draft_leaves_the_state_as_before_once_it_is_rolled_back(fails_at: int) -> None:
    bench = Bench([7, 3])
    rows = np.array([0, 1])
    model = FailingModel(bench.model, fails_at)
    with pytest.raises(RuntimeError, match="out of memory"):
        DraftProcessor().draft(
            model,
            bench.state,
            bench.manager,
            bench.sampler,
            rows,
            np.array([0, 0]),
            np.array([4, 4]),
        )
    RollbackProcessor().rollback(bench.state, bench.manager, rows)
    bench.manager.check_integrity()
    assert bench.state.store.is_finite(np.arange(bench.manager.rows * bench.manager.slots))
    again = DraftProcessor().draft(
        bench.model,
        bench.state,
        bench.manager,
        bench.sampler,
        rows,
        np.array([0, 0]),
        np.array([4, 4]),
    )
    for row in range(2):
        assert again.tree.tokens[row].tolist() == bench.continuation(row, 4)


def test_a_draft_without_room_raises() -> None:
    bench = Bench([MAX_TOKENS - 2])
    rows = np.array([0])
    with pytest.raises(ValueError, match="no free slots"):
        DraftProcessor().draft(
            bench.model,
            bench.state,
            bench.manager,
            bench.sampler,
            rows,
            np.array([0]),
            np.array([4]),
        )
    RollbackProcessor().rollback(bench.state, bench.manager, rows)
    bench.manager.check_integrity()
