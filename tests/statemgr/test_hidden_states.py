"""A row keeps the hidden states of its last committed token, whatever becomes of its slots."""

import numpy as np
import pytest
import torch

from statemgr import ModelState
from tests.kv_layers import kv_layer

ROWS = np.arange(2)
NOTHING = np.zeros(0, dtype=np.int64)


def make_state(canonical: bool = True) -> ModelState:
    layer = kv_layer(torch.device("cpu"), torch.float64, 1, 2)
    return ModelState({0: layer}, rows=2, slots=128, canonical=canonical)


def read(state: ModelState, positions: list[int], states: list[float] | None = None) -> np.ndarray:
    """Both rows read tokens there; `states`: of row 0's, of row 1's they are 100 more."""
    counts = np.full(2, len(positions))
    places = np.tile(positions, 2)
    slots = state.append(ROWS, counts, places, places)
    if states is not None:
        given = torch.tensor([*states, *(100 + each for each in states)])
        state.hidden.add(slots, given[:, None, None].expand(-1, 2, 3))
    return slots.reshape(2, -1)


def kept(state: ModelState) -> list[float | None]:
    found = [
        state.hidden.of(ROWS[row : row + 1]) if state.hidden.has(ROWS)[row] else None
        for row in ROWS
    ]
    return [None if one is None else float(one[0, 1, 2]) for one in found]


@pytest.mark.parametrize("canonical", [True, False])
def test_it_is_that_of_the_last_token_of_the_accepted_path(canonical: bool) -> None:
    state = make_state(canonical)
    read(state, [0, 1, 2, 3], [0, 1, 2, 3])
    tree = read(state, [4, 4, 5], [4, 5, 6])
    assert kept(state) == [None, None]
    state.commit(ROWS, np.array([4, 4]), np.array([tree[0, 1], tree[0, 2], tree[1, 0]]))
    assert kept(state) == [6, 104]
    state.fix_kv_cache(ROWS, hole_share=0.0)
    assert kept(state) == [6, 104]


def test_a_cycle_without_tokens_goes_back_to_the_token_before() -> None:
    state = make_state()
    read(state, [0, 1], [0, 1])
    state.commit(ROWS, np.array([2, 2]), NOTHING)
    read(state, [2, 3], [2, 3])
    state.commit(ROWS, np.array([2, 3]), NOTHING)
    assert kept(state) == [1, 102]


def test_what_is_rolled_back_or_read_without_hidden_states_is_not_kept() -> None:
    state = make_state()
    read(state, [0, 1], [0, 1])
    state.rollback(ROWS, np.array([2, 1]))
    assert kept(state) == [1, 100]
    state.rollback(ROWS, np.array([1, 1]))
    assert kept(state) == [None, 100]
    read(state, [1])
    state.commit(ROWS, np.array([2, 2]), NOTHING)
    assert kept(state) == [None, None]


def test_a_pass_that_fails_leaves_it() -> None:
    state = make_state()
    read(state, [0, 1], [0, 1])
    state.scrub(read(state, [2, 3]).reshape(-1))
    assert kept(state) == [1, 101]


def test_it_goes_with_its_row_and_does_not_come_with_keys_and_values() -> None:
    state = make_state()
    read(state, [0, 1, 2], [0, 1, 2])
    state.commit(ROWS[:1], np.array([3]), NOTHING)
    state.park(0)
    state.inherit(0, np.arange(3), state.slots_of(1, 3))
    assert kept(state) == [None, None]
    state.commit(ROWS, np.array([3, 3]), NOTHING)
    assert kept(state) == [None, 102]
    state.free(1)
    assert kept(state) == [None, None]
