"""After a commit every model keeps the longest prefix that it shares with the committed tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelpool.packed_model import KVLayer
from processors.rollback import RollbackProcessor
from statemgr import ModelState, StateManager

LAYERS = (KVLayer(torch.device("cpu"), torch.float64, 1, 1),)


def roll_back(committed: list[list[int]], cached: list[list[int]]) -> tuple[ModelState, list[int]]:
    """Row i holds the tokens `cached[i]`. Returns the state, and how many each row keeps."""
    manager = StateManager(rows=len(committed) + 1, max_tokens=128)
    state = manager.open_state("any", LAYERS)
    for tokens, held in zip(committed, cached, strict=True):
        row = manager.allocate(tokens, 100)
        assert row is not None
        state.append(np.array([row]), np.array([len(held)]), np.array(held), np.arange(len(held)))
    rows = np.arange(len(committed))
    RollbackProcessor().rollback(state, manager, rows)
    manager.check_integrity()
    return state, state.lengths(rows).tolist()


def common_prefix(first: list[int], second: list[int]) -> int:
    unequal = [i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b]
    return min([*unequal, len(first), len(second)])


@pytest.mark.parametrize(
    ("cached", "kept"),
    [
        ([], 0),
        ([1, 2], 2),  # lagging: all of it is right
        ([1, 2, 3], 3),
        ([1, 2, 3, 4], 3),  # never the last committed token
        ([1, 2, 3, 4, 5, 6], 3),
        ([1, 9, 3], 1),  # what follows a wrong token is wrong
        ([9, 2, 3], 0),
        ([1, 2, -1, -1], 2),  # drafted on the device, never looked at by the host
    ],
)
def test_exactly_the_common_prefix_stays(cached: list[int], kept: int) -> None:
    assert roll_back([[1, 2, 3, 4]], [cached])[1] == [kept]


_tokens = st.lists(st.integers(0, 2), max_size=12)


@settings(max_examples=150, deadline=None, database=None)
@given(st.lists(st.tuples(_tokens.filter(bool), _tokens), min_size=1, max_size=4))
def test_rows_are_rolled_back_each_by_its_own_tokens(
    pairs: list[tuple[list[int], list[int]]],
) -> None:
    committed, cached = [list(part) for part in zip(*pairs, strict=True)]
    _, kept = roll_back(committed, cached)
    assert kept == [common_prefix(tokens[:-1], held) for tokens, held in pairs]


def test_rows_that_are_not_named_stay() -> None:
    manager = StateManager(rows=2, max_tokens=128)
    state = manager.open_state("any", LAYERS)
    for row in range(2):
        manager.allocate([1, 2], 100)
        state.append(np.array([row]), np.array([3]), np.array([7, 7, 7]), np.arange(3))
    RollbackProcessor().rollback(state, manager, np.array([1]))
    assert state.lengths(np.array([0, 1])).tolist() == [3, 0]


def test_no_rows_are_nothing_to_do() -> None:
    manager = StateManager(rows=1, max_tokens=128)
    state = manager.open_state("any", LAYERS)
    state.append(np.array([0]), np.array([2]), np.array([7, 7]), np.arange(2))
    RollbackProcessor().rollback(state, manager, np.zeros(0, dtype=np.int64))
    assert state.lengths(np.array([0])).tolist() == [2]


def test_of_nodes_at_equal_positions_a_wrong_one_ends_the_prefix() -> None:
    """Trees are of width 1; a wider one must be committed before it is rolled back."""
    manager = StateManager(rows=1, max_tokens=128)
    state = manager.open_state("any", LAYERS)
    manager.allocate([1, 2, 3, 4], 100)
    state.append(np.array([0]), np.array([3]), np.array([1, 2, 9]), np.array([0, 1, 1]))
    RollbackProcessor().rollback(state, manager, np.array([0]))
    assert state.lengths(np.array([0])).tolist() == [1]
