"""Rows take memory as they grow; every model's cache is a prefix of the tokens."""

import numpy as np
import pytest
import torch

from statemgr import BLOCK_SLOTS, ModelState, StateManager, row_slots, row_tokens
from tests.kv_layers import kv_layer

LAYERS = {0: kv_layer(torch.device("cpu"), torch.float32, 1, 2)}


def cache(state: ModelState, row: int, tokens: list[int]) -> None:
    """A forward of `tokens` from position 0 on."""
    count = np.array([len(tokens)])
    state.append(np.array([row]), count, np.array(tokens), np.arange(len(tokens)))


@pytest.mark.parametrize("slots", [32, 63, 64, 1000])
def test_the_most_tokens_that_slots_are_enough_for_are_known(slots: int) -> None:
    most = row_tokens(slots, tree_tokens=9)
    assert row_slots(most, tree_tokens=9) <= slots < row_slots(most + 1, tree_tokens=9)


def test_a_tree_has_slots_beside_the_tokens() -> None:
    manager = StateManager(rows=2, max_tokens=120, tree_tokens=9)
    assert manager.slots == 160
    assert StateManager(rows=1, max_tokens=120, tree_tokens=8).slots == 128
    assert manager.can_ever_fit(120)
    assert not manager.can_ever_fit(121)
    assert manager.allocate([1, 2], most=120) == 0
    assert manager.held_slots == 0, "blocks are taken when they are needed"
    assert manager.open_state("draft", LAYERS).slots == 160


def test_a_row_begins_where_there_is_memory_for_its_prompt_and_a_margin() -> None:
    manager = StateManager(rows=8, max_tokens=1024, tree_tokens=16, kv_slots=10 * BLOCK_SLOTS)
    assert manager.slots_to_begin(1, 1024) == 3 * BLOCK_SLOTS  # 64 more, and a tree
    assert manager.slots_to_begin(1, 4) == BLOCK_SLOTS  # which ends before
    assert [manager.allocate([1], most=1000) for _ in range(4)] == [0, 1, 2, None]
    assert manager.allocate([1], most=4) == 3
    assert manager.free_slots == 0
    manager.free(0)
    assert manager.free_slots == 3 * BLOCK_SLOTS
    manager.check_integrity()


def test_rows_grow_and_what_trees_took_goes_to_others() -> None:
    manager = StateManager(rows=2, max_tokens=256, tree_tokens=16, kv_slots=8 * BLOCK_SLOTS)
    for first in (1, 2):
        manager.allocate([first] * 40, most=200)
    both = np.array([0, 1])
    assert manager.grow(both, np.array([200, 40]), partly=True).tolist() == [1]
    assert manager.room(both).tolist() == [7 * BLOCK_SLOTS - 40, BLOCK_SLOTS - 40]
    manager.shrink()
    assert not len(manager.grow(both, np.array([40, 40])))
    assert manager.held_slots == 4 * BLOCK_SLOTS
    assert manager.free_slots == 0, "both are expected to grow"
    assert [manager.released_by(row) for row in (0, 1)] == [4 * BLOCK_SLOTS] * 2
    assert manager.grow(both, np.array([256, 40])).tolist() == [0]
    manager.check_integrity()


def test_what_can_never_fit_is_known_beforehand() -> None:
    manager = StateManager(rows=1, max_tokens=256, tree_tokens=9, kv_slots=160)
    assert manager.can_ever_fit(151)
    assert not manager.can_ever_fit(152)
    assert StateManager(rows=1, max_tokens=256).can_ever_fit(256)
    assert not StateManager(rows=1, max_tokens=256).can_ever_fit(257)


def test_a_row_never_has_more_tokens_than_it_may() -> None:
    manager = StateManager(rows=1, max_tokens=128)
    manager.allocate([1, 2], most=4)
    manager.extend(0, np.array([3, 4]))
    assert manager.committed(0).tolist() == [1, 2, 3, 4]
    with pytest.raises(AssertionError, match="more tokens than the row may have"):
        manager.extend(0, np.array([5]))


def test_a_state_is_made_once_and_forgotten_when_dropped() -> None:
    manager = StateManager(rows=2, max_tokens=128)
    assert manager.state("draft") is None
    manager.allocate([5, 6, 7], most=10)
    state = manager.open_state("draft", LAYERS)
    cache(state, 0, [5, 6])
    assert manager.open_state("draft", LAYERS) is state
    manager.check_integrity()
    manager.drop_state("draft")
    assert manager.state("draft") is None
    assert manager.open_state("draft", LAYERS).lengths(np.array([0])).tolist() == [0]
    manager.drop_state("never opened")


@pytest.mark.parametrize("models", [0, 1])
def test_tokens_of_a_free_row_are_noticed(models: int) -> None:
    manager = StateManager(rows=1, max_tokens=128)
    for _ in range(models):
        manager.open_state("draft", LAYERS)
    manager.counts[0] = 2
    with pytest.raises(AssertionError, match="row 0"):
        manager.check_integrity()
