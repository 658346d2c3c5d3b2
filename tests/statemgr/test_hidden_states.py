"""Hidden states of committed tokens are told once, whatever becomes of their slots."""

import numpy as np
import torch

from statemgr import ModelState
from tests.kv_layers import kv_layer

ROWS = np.arange(2)
NOTHING = np.zeros(0, dtype=np.int64)


def make_state() -> ModelState:
    layer = kv_layer(torch.device("cpu"), torch.float64, 1, 2)
    return ModelState({0: layer}, rows=2, slots=128)


def read(state: ModelState, positions: list[int], states: list[float] | None = None) -> np.ndarray:
    """Both rows read tokens there; `states`: of row 0's, of row 1's they are 100 more."""
    counts = np.full(2, len(positions))
    places = np.tile(positions, 2)
    slots = state.append(ROWS, counts, places, places)
    if states is not None:
        given = torch.tensor([*states, *(100 + each for each in states)])
        state.hidden.add(slots, given[:, None, None].expand(-1, 2, 3))
    return slots.reshape(2, -1)


def told(state: ModelState) -> dict[int, list[tuple[int, float]]]:
    """By row: positions, and the states of their tokens."""
    found: dict[int, list[tuple[int, float]]] = {0: [], 1: []}
    for rows, positions, states in state.hidden.take_committed():
        own = zip(rows.tolist(), positions.tolist(), states[:, 1, 2].tolist(), strict=True)
        for row, position, value in own:
            found[row].append((position, value))
    return found


def test_it_is_those_of_the_accepted_path() -> None:
    state = make_state()
    read(state, [0, 1, 2], [0, 1, 2])
    tree = read(state, [3, 3, 4], [3, 4, 5])
    assert told(state) == {0: [], 1: []}
    state.commit(ROWS, np.array([3, 3]), np.array([tree[0, 1], tree[0, 2], tree[1, 0]]))
    row = [(0, 0), (1, 1), (2, 2)]
    assert told(state) == {
        0: [*row, (3, 4), (4, 5)],
        1: [*((at, 100 + value) for at, value in row), (3, 103)],
    }
    assert told(state) == {0: [], 1: []}


def test_what_is_rolled_back_is_not_told() -> None:
    state = make_state()
    read(state, [0, 1], [0, 1])
    state.rollback(ROWS, np.array([2, 1]))
    assert told(state) == {0: [(0, 0), (1, 1)], 1: [(0, 100)]}
    read(state, [2])
    state.commit(ROWS, np.array([3, 2]), NOTHING)
    assert told(state) == {0: [], 1: []}


def test_they_go_with_their_row_and_do_not_come_with_keys_and_values() -> None:
    state = make_state()
    read(state, [0, 1, 2], [0, 1, 2])
    state.commit(ROWS, np.array([3, 3]), NOTHING)
    state.free(0)
    state.inherit(0, np.arange(3))
    state.commit(ROWS, np.array([3, 3]), NOTHING)
    assert told(state) == {0: [], 1: [(0, 100), (1, 101), (2, 102)]}
