"""Recurrent states of rows against running averages that are computed naively."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from modelpool.recurrent import RecurrentLayer
from statemgr import (
    CacheUse,
    KVMismatchError,
    ModelState,
    StateManager,
    TokenChain,
    TokenOrder,
    export_row,
    import_row,
)
from test_support.toy_hybrid import RunningAverage

KIND = RunningAverage(1)
LAYERS = {
    (number, KIND.name): RecurrentLayer(torch.device("cpu"), torch.float64, KIND)
    for number in (0, 2)
}
DECAY = 0.5


def average(text: Sequence[int]) -> float:
    state = 0.0
    for token in text:
        state = DECAY * state + (1 - DECAY) * token
    return state


def make_state(wanted: dict[int, set[int]] | None = None) -> ModelState:
    return ModelState({}, 2, 128, recurrent=LAYERS, wanted=wanted)


def feed(
    state: ModelState,
    row: int,
    tokens: Sequence[int],
    certain: int = 0,
    parents: Sequence[int] | None = None,
    layers: Sequence[int] = (0, 2),
    depths: Sequence[int] | None = None,
    scale: float = 1.0,
) -> list[float]:
    """What each token reads. `parents`: places in this pass; -1: what came before it."""
    rows, count = np.array([row]), np.array([len(tokens)])
    first = int(state.lengths(rows)[0])
    positions = first + (np.arange(len(tokens)) if depths is None else np.array(depths))
    slots = state.append(rows, count, np.array(tokens), positions)
    chosen = None
    if parents is not None:
        chosen = np.array([slots[each] if each >= 0 else -1 for each in parents])
    view = state.view(rows, count, positions, slots, order=TokenOrder(np.array([certain]), chosen))
    value = torch.tensor(tokens, dtype=torch.float64)[:, None] * scale
    given = (torch.ones_like(value), value, torch.full_like(value, DECAY))
    try:
        outputs = [view.scan(number, KIND, given) for number in layers]
        if len(outputs) < len(LAYERS):
            raise ZeroDivisionError
    except ZeroDivisionError:
        state.scrub(slots)
        raise
    assert torch.equal(*(each.nan_to_num() for each in outputs))
    found: list[float] = outputs[0][:, 0].tolist()
    return found


def length(state: ModelState, row: int) -> int:
    return int(state.lengths(np.array([row]))[0])


def keep(state: ModelState, row: int, base: int, slots: Sequence[int] = ()) -> None:
    numbers = np.array([row * state.slots + slot for slot in slots], dtype=np.int64)
    state.commit(np.array([row]), np.array([base]), numbers)


def test_a_token_reads_its_own_path_whatever_else_is_in_the_pass() -> None:
    state = make_state()
    text = [3, 1, 4, 1]
    assert feed(state, 0, text, certain=3)[-1] == average(text)
    feed(state, 1, [9, 9], certain=1)
    with pytest.raises(AssertionError, match="stay"):
        feed(state, 0, [7], certain=1)
    state = make_state()
    feed(state, 0, text[:3], certain=3)
    got = feed(state, 0, [1, 5, 9, 2, 6, 5], parents=[-1, 0, 0, 1, 1, 3], depths=[0, 1, 1, 2, 2, 3])
    paths = [[1], [1, 5], [1, 9], [1, 5, 2], [1, 5, 6], [1, 5, 2, 5]]
    assert got == [average([3, 1, 4, *path]) for path in paths]
    keep(state, 0, 4, [4, 6, 8])
    state.check_integrity(0, np.array([3, 1, 4, 1, 5, 2, 5, 7]))
    assert feed(state, 0, [7])[0] == average([3, 1, 4, 1, 5, 2, 5, 7])


def test_what_is_not_committed_leaves_no_trace() -> None:
    state = make_state()
    feed(state, 0, [3, 1], certain=1)
    feed(state, 0, [9], scale=float("nan"))
    keep(state, 0, 1)
    assert length(state, 0) == 1
    assert feed(state, 0, [8])[0] == average([3, 8])


@pytest.mark.parametrize("certain", [0, 1, 3])
def test_a_pass_that_fails_between_layers_leaves_a_row_that_reads_on_exactly(certain: int) -> None:
    state = make_state({0: {2}})
    feed(state, 0, [3, 1, 4], certain=3)
    with pytest.raises(ZeroDivisionError):
        feed(state, 0, [1, 5, 9], certain=certain, layers=(0,))
    assert length(state, 0) == (2 if certain else 3), "goes back to the state that was kept"
    text = [3, 1, 4, 1, 5, 9, 2]
    assert feed(state, 0, text[length(state, 0) :], certain=2)[-1] == average(text)
    assert not length(state, 1)


def manager_with(text: Sequence[int], rows: int = 2) -> tuple[StateManager, ModelState, int]:
    """A row has read all of a text but its last token, under a salt."""
    manager = StateManager(rows=rows, max_tokens=128)
    state = manager.open_state("hybrid", {}, LAYERS, is_target=True)
    row = manager.allocate(text, 128, CacheUse("a"))
    assert row is not None
    feed(state, row, text[:-1], certain=len(text) - 1)
    return manager, state, row


def test_a_prefix_is_good_up_to_a_state_that_was_kept() -> None:
    text = [3, 1, 4, 1, 5, 9, 2, 6]
    manager, state, row = manager_with(text)
    manager.free(row, keep=True)
    same, longer, other = [*text], [*text, 7], [*text[:4], 8, 8]
    assert manager.cached(TokenChain(same), CacheUse("a")) == {"hybrid": 7}
    assert manager.cached(TokenChain(longer), CacheUse("a")) == {"hybrid": 7}
    assert manager.cached(TokenChain(other), CacheUse("a")) == {"hybrid": 0}
    row = manager.allocate(other, 128, CacheUse("a")) or 0
    feed(state, row, other[:-1], certain=5)  # keeps a state where the texts part
    manager.free(row, keep=True)
    another = [*text[:4], 7, 7]
    assert manager.cached(TokenChain(another), CacheUse("a")) == {"hybrid": 4}
    row = manager.allocate(another, 128, CacheUse("a")) or 0
    assert length(state, row) == 4
    assert feed(state, row, another[4:])[-1] == average(another)
    keep(state, row, 5)
    manager.check_integrity()


def serve(manager: StateManager, text: Sequence[int]) -> None:
    """A request's life, after which others may begin as it did."""
    state, row = manager.state("hybrid"), manager.allocate(text, len(text), CacheUse("a"))
    assert state is not None
    assert row is not None
    done = length(state, row)
    feed(state, row, text[done:-1], certain=len(text) - 1 - done)
    manager.free(row, keep=True)
    manager.check_integrity()


def test_the_prefix_with_the_deepest_state_is_found_not_the_one_that_shares_the_most() -> None:
    text = [3, 1, 4, 1, 5, 9, 2, 6]
    manager = StateManager(rows=4, max_tokens=384)
    manager.open_state("hybrid", {}, LAYERS, is_target=True)
    serve(manager, text)
    serve(manager, [*text[:4], 8, 8])  # keeps a state where the texts part
    assert manager.cached(TokenChain([*text[:6], 7, 7]), CacheUse("a")) == {"hybrid": 4}
    serve(manager, [*text[:6], 7, 7])  # the same, where it parts from the first one
    assert manager.cached(TokenChain([*text[:6], 5, 5]), CacheUse("a")) == {"hybrid": 6}
    long = [*range(300)]
    serve(manager, long)
    serve(manager, [*long[:100], 8, 8])  # in another block
    assert manager.cached(TokenChain([*long[:290], 7]), CacheUse("a")) == {"hybrid": 100}


def test_a_follower_takes_over_where_it_parts_from_its_leader() -> None:
    text = [3, 1, 4, 1, 5, 9, 2, 6]
    manager = StateManager(rows=2, max_tokens=128)
    state = manager.open_state("hybrid", {}, LAYERS, is_target=True)
    leader = manager.allocate(text, 128, CacheUse("a"))
    follower = manager.allocate([*text[:5], 7, 7], 128, CacheUse("a"))
    assert leader is not None
    assert follower is not None
    feed(state, leader, text[:3], certain=3)
    assert manager.follow() == []
    assert manager.leaders() == {follower: (leader, 5)}
    feed(state, leader, text[3:7], certain=4)
    assert manager.follow() == [follower]
    assert manager.leaders() == {}
    assert feed(state, follower, [7, 7])[-1] == average([*text[:5], 7, 7])


def test_a_follower_that_comes_too_late_does_not_wait() -> None:
    text = [3, 1, 4, 1, 5, 9, 2, 6]
    manager, state, _ = manager_with(text)
    follower = manager.allocate([*text[:5], 7, 7], 128, CacheUse("a"))
    assert follower is not None
    assert manager.follow() == []
    assert manager.leaders() == {}
    assert length(state, follower) == 0


def test_states_of_prefixes_that_were_used_last_are_kept_within_a_budget() -> None:
    manager, state, row = manager_with([1, 2, 3], rows=1)
    manager.free(row, keep=True)
    for first in range(20, 30):
        text = [first, 1, 2]
        row = manager.allocate(text, 20, CacheUse("a")) or 0
        feed(state, row, text[:-1], certain=2)
        manager.free(row, keep=True)
        manager.check_integrity()
    assert manager.cached(TokenChain([29, 1, 2]), CacheUse("a")) == {"hybrid": 2}
    assert not any(manager.cached(TokenChain([1, 2, 3]), CacheUse("a")).values())


def test_a_row_goes_on_in_another_process_from_keys_and_values_and_a_state() -> None:
    text = np.array([3, 1, 4, 1, 5])
    source, goal = make_state(), make_state()
    feed(source, 0, text[:3].tolist(), certain=3)
    first = export_row(source, 0, 0, 3, text, "m")
    feed(source, 0, [1], certain=1)
    last = export_row(source, 0, 3, 4, text, "m")
    assert (len(first.state), len(last.state)) == (0, 2 * 8)
    for part in (first, last):
        import_row(goal, 1, part, text, "m")
    goal.check_integrity(1, text)
    assert feed(goal, 1, [5])[0] == average(text.tolist())
    other = ModelState({}, 2, 128, recurrent={(0, KIND.name): LAYERS[0, KIND.name]})
    with pytest.raises(KVMismatchError, match="recurrent layers"):
        import_row(other, 0, last, text, "m")
