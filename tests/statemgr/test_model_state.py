"""A model's cache forgets by mask, puts accepted nodes in order, and notices when it is corrupt."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from statemgr import BLOCK_SLOTS, ModelState
from statemgr.blocks import BlockTables
from tests.kv_layers import kv_layer
from tests.statemgr.cache_machine import CacheMachine

SLOTS = 128
ROWS = np.array([0])
NOTHING = np.zeros(0, dtype=np.int64)
LAYERS = dict.fromkeys(range(2), kv_layer(torch.device("cpu"), torch.float64, 2, 4))
PARTS = 2  # of the many random lives, for two processes


def make_state() -> ModelState:
    return ModelState(LAYERS, rows=3, slots=SLOTS)


def fill(state: ModelState, row: int, positions: list[int]) -> None:
    """Appends tokens 100 + slot; slot i's key is i + 1 and its value -i - 1 in every layer."""
    start = int(state.ends[row])
    numbers = np.arange(start, start + len(positions))
    slots = state.append(
        np.array([row]), np.array([len(positions)]), 100 + numbers, np.array(positions)
    )
    slots = state.tables.flat(slots)
    for layer in range(2):
        keys, values = state.store.layer(layer)
        keys[torch.from_numpy(slots)] = torch.from_numpy(numbers + 1.0)[:, None, None]
        values[torch.from_numpy(slots)] = -torch.from_numpy(numbers + 1.0)[:, None, None]


def stored(state: ModelState, row: int, count: int) -> list[float]:
    """The keys' numbers in the first `count` slots, valid or not."""
    keys, values = state.store.layer(1)
    part = torch.from_numpy(state.slots_of(row, count))
    assert torch.equal(values[part], -keys[part])
    numbers: list[float] = keys[part, 1, 3].tolist()
    return numbers


def test_random_lives_of_rows_match_a_naive_account() -> None:
    few = settings(max_examples=60, stateful_step_count=20, deadline=None, database=None)
    run_state_machine_as_test(CacheMachine, settings=few)


@pytest.mark.exact
@pytest.mark.parametrize("part", range(PARTS))
def test_many_random_lives_of_rows_match_a_naive_account(
    part: int, pytestconfig: pytest.Config
) -> None:
    lives = pytestconfig.getoption("lives") // PARTS
    many = settings(max_examples=lives, stateful_step_count=20, deadline=None, database=None)
    run_state_machine_as_test(CacheMachine, settings=many)


@pytest.mark.parametrize("base", [4, 2])
def test_what_was_given_back_is_not_committed(base: int) -> None:
    state = make_state()
    fill(state, 0, [0, 0, 1, 2, 3])
    state.commit(ROWS, np.array([0]), np.array([1, 2, 3, 4]))
    fill(state, 0, [4, 5])
    state.commit(ROWS, np.array([base]), np.array([], dtype=np.int64))
    assert state.ends[0] == base
    state.commit(ROWS, np.array([4]), np.array([4, 5]))
    assert state.lengths(ROWS).tolist() == [base]
    state.check_integrity(0, np.array([101, 102, 103, 104, 105, 106, 5]))


def test_tokens_that_the_device_drafted_are_learnt_later() -> None:
    state = make_state()
    slots = state.append(np.array([2]), np.array([2]), np.array([-1, -1]), np.array([0, 1]))
    state.set_tokens(slots, np.array([30, 31]))
    state.check_integrity(2, np.array([30, 31, 32]))
    with pytest.raises(AssertionError):
        state.check_integrity(2, np.array([30, 99, 32]))


@pytest.mark.parametrize(
    ("array", "place", "value", "complaint"),
    [
        ("cache_mask", (0, 1), False, "not a prefix"),
        ("positions", (0, 2), 1, "not in order"),
        ("cache_tokens", (0, 2), 103, "other tokens"),
        ("ends", 0, 2, "miscounted"),
        ("_lengths", 0, 2, "miscounted"),
        ("filled", 0, 4, "more is filled than committed"),
    ],
)
def test_corruption_is_noticed(array: str, place: Any, value: int, complaint: str) -> None:
    state = make_state()
    fill(state, 0, [0, 1, 2])
    committed = np.array([100, 101, 102, 103])
    state.check_integrity(0, committed)
    with pytest.raises(AssertionError, match="the last token"):
        state.check_integrity(0, committed[:3])
    getattr(state, array)[place] = value
    with pytest.raises(AssertionError, match=complaint):
        state.check_integrity(0, committed)


def test_a_row_lies_wherever_blocks_are_free() -> None:
    tables = BlockTables(rows=2, width=3, blocks=6)
    state = ModelState(LAYERS, 2, 3 * BLOCK_SLOTS, tables)
    for row in (0, 1) * 3:
        fill(state, row, [*range(int(state.ends[row]), int(state.ends[row]) + BLOCK_SLOTS)])
    for row in (0, 1):
        assert stored(state, row, 3 * BLOCK_SLOTS) == list(range(1, 3 * BLOCK_SLOTS + 1))
    assert sorted([*tables.of(0), *tables.of(1)]) == list(range(6))
    assert (np.diff(tables.of(0)) != 1).all()
    view = state.view(np.array([1]), np.array([0]), NOTHING, NOTHING)
    assert view.pack.tables.tolist() == [tables.of(1).tolist()]
    assert view.pack.lengths.tolist() == [3 * BLOCK_SLOTS]


def test_a_row_that_finds_no_block_stays_as_it_is() -> None:
    tables = BlockTables(rows=2, width=3, blocks=3)
    tables.grow(np.array([0]), np.array([2 * BLOCK_SLOTS]))
    state = ModelState(LAYERS, 2, 3 * BLOCK_SLOTS, tables)
    fill(state, 1, [*range(BLOCK_SLOTS)])
    with pytest.raises(ValueError, match="no free slots"):
        fill(state, 1, [BLOCK_SLOTS])
    assert state.lengths(np.array([1])).tolist() == [BLOCK_SLOTS]
    assert tables.grow(np.array([0, 1]), np.array([33, 33]), partly=True).tolist() == [1]
    assert tables.sizes.tolist() == [2, 1]
