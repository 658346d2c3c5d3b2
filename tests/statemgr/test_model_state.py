"""A model's cache forgets by mask, moves only to compact, and notices when it is corrupt."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from statemgr import ModelState
from tests.kv_layers import kv_layer
from tests.statemgr.cache_machine import CacheMachine

SLOTS = 128
ROWS = np.array([0])
PARTS = 2  # of the many random lives, for two processes


def make_state(canonical: bool = False) -> ModelState:
    return ModelState(
        dict.fromkeys(range(2), kv_layer(torch.device("cpu"), torch.float64, 2, 4)),
        rows=3,
        slots=SLOTS,
        canonical=canonical,
    )


def fill(state: ModelState, row: int, positions: list[int]) -> None:
    """Appends tokens 100 + slot; slot i's key is i + 1 and its value -i - 1 in every layer."""
    start = int(state.ends[row])
    numbers = np.arange(start, start + len(positions))
    slots = state.append(
        np.array([row]), np.array([len(positions)]), 100 + numbers, np.array(positions)
    )
    for layer in range(2):
        keys, values = state.store.layer(layer)
        keys[torch.from_numpy(slots)] = torch.from_numpy(numbers + 1.0)[:, None, None]
        values[torch.from_numpy(slots)] = -torch.from_numpy(numbers + 1.0)[:, None, None]


def stored(state: ModelState, row: int, count: int) -> list[float]:
    """The keys' numbers in the first `count` slots, valid or not."""
    keys, values = state.store.layer(1)
    part = slice(row * SLOTS, row * SLOTS + count)
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


def test_a_drafter_keeps_an_accepted_path_where_it_lies() -> None:
    state = make_state()
    fill(state, 0, [*range(8), 8, 8, 9, 9])  # eight committed; two nodes at 8, two at 9
    state.commit(ROWS, np.array([8]), np.array([9, 11]))
    assert state.cache_mask[0].nonzero()[0].tolist() == [*range(8), 9, 11]
    assert stored(state, 0, 12) == list(range(1, 13))
    state.check_integrity(0, np.array([*range(100, 108), 109, 111, 5]))


@pytest.mark.parametrize(("base", "end"), [(4, 5), (2, 2)])  # then it is compacted, too
def test_what_was_given_back_is_not_committed(base: int, end: int) -> None:
    state = make_state()
    fill(state, 0, [0, 0, 1, 2, 3])
    state.commit(ROWS, np.array([0]), np.array([1, 2, 3, 4]))
    fill(state, 0, [4, 5])
    state.commit(ROWS, np.array([base]), np.array([], dtype=np.int64))
    assert state.ends[0] == end
    state.commit(ROWS, np.array([4]), np.array([5, 6]))
    assert state.lengths(ROWS).tolist() == [base]
    state.check_integrity(0, np.array([101, 102, 103, 104, 105, 106, 5]))


def test_holes_are_compacted_only_beyond_their_share() -> None:
    state = make_state()
    fill(state, 0, [0, 1, 2, 3, 4, 5, 6, 7, 7])
    state.commit(ROWS, np.array([7]), np.array([8]))  # 1 hole in 9 slots
    state.fix_kv_cache(ROWS)
    assert state.ends[0] == 9
    state.fix_kv_cache(ROWS, hole_share=0.1)
    assert state.ends[0] == 8
    assert stored(state, 0, 8) == [1, 2, 3, 4, 5, 6, 7, 9]


def test_what_is_appended_within_the_room_that_was_made_moves_nothing() -> None:
    state = make_state()
    fill(state, 0, [*range(SLOTS - 4), SLOTS - 5])
    state.commit(ROWS, np.array([SLOTS - 5]), np.array([SLOTS - 4]))  # one hole
    assert state.ends[0] == SLOTS - 3
    assert state.make_room(ROWS, np.array([4])) == SLOTS - 4
    first = state.append(ROWS, np.array([2]), np.array([5, 6]), np.array([SLOTS - 4, SLOTS - 3]))
    state.append(ROWS, np.array([2]), np.array([7, 8]), np.array([SLOTS - 2, SLOTS - 1]))
    assert state.cache_tokens[0, first].tolist() == [5, 6]
    assert state.cache_mask[0].all()


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
        ("positions", (0, 2), 1, "not a prefix"),
        ("cache_tokens", (0, 2), 103, "other tokens"),
        ("ends", 0, 2, "counts as free"),
    ],
)
def test_corruption_is_noticed(array: str, place: Any, value: int, complaint: str) -> None:
    state = make_state(canonical=True)
    fill(state, 0, [0, 1, 2])
    committed = np.array([100, 101, 102, 103])
    state.check_integrity(0, committed)
    with pytest.raises(AssertionError, match="the last token"):
        state.check_integrity(0, committed[:3])
    getattr(state, array)[place] = value
    with pytest.raises(AssertionError, match=complaint):
        state.check_integrity(0, committed)


def test_order_in_memory_matters_to_a_canonical_state_only() -> None:
    for canonical in (False, True):
        state = make_state(canonical)
        fill(state, 0, [1, 0])
        if canonical:
            with pytest.raises(AssertionError, match="not canonical"):
                state.check_integrity(0, np.array([101, 100, 5]))
        else:
            state.check_integrity(0, np.array([101, 100, 5]))


def test_a_free_row_with_slots_in_use_is_noticed() -> None:
    state = make_state()
    fill(state, 0, [0])
    with pytest.raises(AssertionError, match="row 0 is not free"):
        state.check_free(0)
    state.ends[0] = 0
    with pytest.raises(AssertionError, match="valid slots"):
        state.check_free(0)


def test_a_freed_row_holds_nothing_that_could_poison_the_next() -> None:
    state = make_state()
    fill(state, 0, [0, 1, 2])
    keys, values = state.store.layer(0)
    keys[:3] = torch.nan
    values[:3] = torch.inf
    state.rollback(np.array([0]), np.array([1]))
    state.free(0)
    assert not keys[: state.slots].any()
    assert not values[: state.slots].any()
