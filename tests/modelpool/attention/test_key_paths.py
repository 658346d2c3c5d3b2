"""Paths lead through a state's slots: each token's keys are where they were written."""

import numpy as np
import pytest
import torch

from modelpool.attention.path import KeyPaths, PathLayout
from statemgr import ModelState, TreePaths
from tests.kv_layers import kv_layer

CPU = torch.device("cpu")
ROWS, SLOTS = 3, 128


@pytest.fixture
def state() -> ModelState:
    return ModelState({0: kv_layer(CPU, torch.float64, 1, 2)}, ROWS, SLOTS, canonical=True)


def fill(state: ModelState, row: int, count: int) -> None:
    places = np.arange(count)
    state.append(np.array([row]), np.array([count]), places, places)


def keys_of(paths: KeyPaths, token: int) -> list[int]:
    """Slots of a token's keys in order, as `modelpool.attention.path.KeyPaths` says."""
    first, tail = int(paths.firsts[token]), int(paths.tails[token])
    return [
        first + (j if j < tail else tail + int(paths.path[token, j - tail]))
        for j in range(int(paths.positions[token]) + 1)
    ]


def test_tokens_of_texts_read_their_rows_in_order(state: ModelState) -> None:
    fill(state, 0, 3)
    rows, counts, positions = np.array([0, 2]), np.array([2, 1]), np.array([3, 4, 0])
    slots = state.append(rows, counts, positions, positions)
    paths = state.view(rows, counts, positions, slots).layout(PathLayout).on(CPU)
    assert [keys_of(paths, token) for token in range(3)] == [
        [0, 1, 2, 3], [0, 1, 2, 3, 4], [2 * SLOTS],
    ]  # fmt: skip
    assert paths.longest == 5


def test_nodes_of_a_tree_read_their_own_paths(state: ModelState) -> None:
    """Row 1: two tokens, then a root and its tree: two children, and a child of the second."""
    fill(state, 1, 2)
    rows, counts, positions = np.array([1]), np.array([4]), np.array([2, 3, 3, 4])
    slots = state.append(rows, counts, positions, positions)
    routes = torch.tensor([[0, 0], [0, 0], [1, 0], [1, 2]], dtype=torch.int32)
    tree = TreePaths(np.array([SLOTS, 3, SLOTS]), routes)
    paths = state.view(rows, counts, positions, slots, tree).layout(PathLayout).on(CPU)
    text = [SLOTS, SLOTS + 1, SLOTS + 2]
    assert [keys_of(paths, token) for token in range(4)] == [
        text, [*text, SLOTS + 3], [*text, SLOTS + 4], [*text, SLOTS + 4, SLOTS + 5],
    ]  # fmt: skip


def test_a_state_with_holes_has_no_paths(state: ModelState) -> None:
    fill(state, 0, 3)
    one, place = np.array([1]), np.array([5])
    slots = state.append(np.array([0]), one, place, place)  # in slot 3
    with pytest.raises(AssertionError, match="order of positions"):
        state.view(np.array([0]), one, place, slots).layout(PathLayout).on(CPU)
