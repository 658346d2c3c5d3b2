"""Rows take over what others have read, under their own salt alone, and never what was rejected."""

import logging
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from statemgr import CacheUse, KVStore, StateManager, TokenChain
from statemgr.arena import KV_QUANTUM
from statemgr.prefix_cache import CachedPrefix
from tests.kv_layers import kv_layer
from tests.statemgr.sharing_machine import SharingMachine

LAYERS = {0: kv_layer(torch.device("cpu"), torch.float32, 1, 2)}
USE = CacheUse("salt")


def manager_of(blocks: int, rows: int = 4, models: tuple[str, ...] = ("target",)) -> StateManager:
    """Rows of at most four blocks, without trees."""
    manager = StateManager(rows, 4 * KV_QUANTUM, kv_slots=blocks * KV_QUANTUM)
    for name in models:
        manager.open_state(name, LAYERS, canonical=name == "target")
    return manager


def text(first: int, length: int) -> list[int]:
    return [first, *range(1000, 1000 + length - 1)]


def read(manager: StateManager, row: int, name: str = "target") -> None:
    """A forward of all tokens of a row but the last one."""
    state, tokens = manager.state(name), manager.committed(row)[:-1]
    assert state is not None
    done = int(state.lengths(np.array([row]))[0])
    left = tokens[done:]
    state.append(np.array([row]), np.array([len(left)]), left, done + np.arange(len(left)))


def served(manager: StateManager, tokens: list[int], use: CacheUse = USE) -> int:
    """A request's life; tokens of it that were read before."""
    row = manager.allocate(tokens, len(tokens), use)
    assert row is not None
    cached = manager.inherited(row)
    read(manager, row)
    manager.free(row, keep=True)
    manager.check_integrity()
    return cached


def test_random_lives_share_what_a_naive_account_says() -> None:
    few = settings(max_examples=40, stateful_step_count=25, deadline=None, database=None)
    run_state_machine_as_test(SharingMachine, settings=few)


def test_a_row_that_follows_says_so_whichever_model_it_copied() -> None:
    """The tokens of the second model are no more than those that it has in the first."""
    machine = SharingMachine()
    machine.open_manager(blocks=3)
    machine.admit(kind=0, length=2, more=1, salt="b", reads=False)
    machine.read(row=0, name="target", count=1)
    machine.admit(kind=0, length=3, more=1, salt="b", reads=True)
    machine.read(row=0, name="draft", count=1)
    machine.follow()
    machine.every_valid_slot_holds_its_texts_number()


def test_what_a_row_has_read_is_found_though_another_will_have_read_more() -> None:
    manager = manager_of(16)
    for length in (100, 200):
        assert manager.allocate(text(1, length), length, CacheUse("salt", reads=False)) is not None
        if length == 100:
            read(manager, 0)
    assert manager.allocate(text(1, 300), 300, USE) == 2
    assert manager.inherited(2) == 99
    assert manager.leaders() == {2: (1, 200)}


def test_a_prefix_whose_longest_model_is_lost_claims_what_the_others_have() -> None:
    machine = SharingMachine()
    machine.open_manager(blocks=3)
    machine.admit(kind=0, length=3, more=1, salt="a", reads=False)
    machine.read(row=0, name="draft", count=1)
    machine.read(row=0, name="target", count=2)
    machine.end(row=0, keep=True)
    machine.lose_model("target")
    machine.every_valid_slot_holds_its_texts_number()


def test_a_prefix_that_lost_a_model_hides_no_longer_one_and_gives_back_its_memory() -> None:
    manager = manager_of(16, models=("target", "draft"))
    for model, tokens in (("draft", text(1, 200)), ("target", [*text(1, 200), *range(200)])):
        row = manager.allocate(tokens, len(tokens), CacheUse("salt", reads=False))
        assert row is not None
        read(manager, row, model)
        if model == "target":
            state = manager.state("draft")
            assert state is not None
            state.append(np.array([row]), np.array([50]), np.array(tokens[:50]), np.arange(50))
        manager.free(row, keep=True)
    manager.drop_state("target")
    manager.check_integrity()
    assert manager.cached_slots == 3 * KV_QUANTUM  # 199 tokens and 50
    assert manager.cached(TokenChain([*text(1, 200), *range(200)]), USE) == {"draft": 199}


def test_what_is_copied_again_after_a_loss_counts_once() -> None:
    manager = manager_of(16, models=("target", "draft"))
    for _ in range(2):
        assert manager.allocate(text(1, 300), 300, USE) is not None
    for _ in range(3):
        read(manager, 0, "draft")
        assert manager.follow() == [1]
        assert manager.inherited(1) == manager.cache_counts.cached_tokens == 299
        manager.drop_state("draft")
        manager.open_state("draft", LAYERS)


@pytest.mark.exact
def test_many_random_lives_share_what_a_naive_account_says(pytestconfig: pytest.Config) -> None:
    lives = pytestconfig.getoption("lives") // 5  # each takes five times as long
    many = settings(max_examples=lives, stateful_step_count=40, deadline=None, database=None)
    run_state_machine_as_test(SharingMachine, settings=many)


def test_a_prefix_is_found_to_the_token_and_its_last_one_is_read_again() -> None:
    manager = manager_of(16)
    assert served(manager, text(1, 300)) == 0
    assert served(manager, text(1, 300)) == 299
    assert served(manager, [*text(1, 200), 7, 8]) == 200
    assert served(manager, text(1, 131)) == 130
    assert served(manager, text(2, 300)) == 0
    assert served(manager, [1]) == 0


def test_whoever_has_another_salt_or_none_finds_nothing() -> None:
    manager = manager_of(16)
    served(manager, text(1, 200))
    for use in (CacheUse("other"), CacheUse(), CacheUse("salt", reads=False)):
        assert served(manager, text(1, 200), use) == 0
    assert manager.cached(TokenChain(text(1, 200)), CacheUse("none of these")) == {}
    assert manager.cached(TokenChain(text(1, 200)), USE) == {"target": 199}


def test_equal_hashes_share_no_token_that_differs() -> None:
    manager = manager_of(16)
    with mock.patch("statemgr.prefix_cache.hash", return_value=7, create=True):
        served(manager, text(1, 300))
        assert served(manager, text(2, 300)) == 0
        assert served(manager, [*text(1, 140), *text(3, 100)]) == 140


def test_the_least_recently_used_prefix_goes_first() -> None:
    manager = manager_of(8)
    for first in (1, 2, 3, 4):
        served(manager, text(first, 250))  # two blocks each
    assert served(manager, [*text(1, 250), 5]) == 249
    assert manager.cache_counts.evictions == 0
    served(manager, text(5, 250))
    found = [bool(manager.cached(TokenChain(text(n, 250)), USE)) for n in (1, 2, 3, 4, 5)]
    assert found == [True, False, True, True, True]
    assert manager.cache_counts.evictions == 1


def test_a_text_that_goes_on_is_kept_once() -> None:
    manager = manager_of(16)
    for length in (200, 300, 400, 300, 400):
        served(manager, text(1, length))
    assert manager.cached_slots == 4 * KV_QUANTUM
    assert [manager.allocate(text(1, 100), 100, USE) for _ in range(4)] == [0, 1, 2, 3]


def test_what_is_cached_is_free_for_who_runs() -> None:
    manager = manager_of(5)
    served(manager, text(1, 500))
    assert manager.free_slots == 5 * KV_QUANTUM
    rows = [manager.allocate(text(first, 120), 128, CacheUse()) for first in range(5)]
    assert rows == [0, 1, 2, 3, None]
    assert manager.cached_slots == 0


def test_what_is_cached_is_counted_while_others_use_it() -> None:
    """As metrics are asked for in another thread than the one that serves."""
    manager = manager_of(16)
    for first in (1, 2):
        served(manager, text(first, 200))
    oldest = manager._cache.oldest()
    assert oldest is not None

    def meanwhile() -> int:
        manager._cache.touch(oldest)
        return 2

    blocks = mock.PropertyMock(side_effect=meanwhile)
    with mock.patch.object(CachedPrefix, "blocks", blocks, create=True):
        assert manager.cached_slots == 4 * KV_QUANTUM


def test_rows_by_need_fit_where_whole_rows_would_not() -> None:
    """And the long one has its extent though the short ones stand all over the memory."""
    manager = StateManager(33, 8192, tree_tokens=80, kv_slots=(32 * 2 + 64) * KV_QUANTUM)
    assert manager.kv_slots < 3 * manager.slots
    manager.open_state("target", LAYERS, canonical=True)
    short = [manager.allocate([1] * 100, 128) for _ in range(32)]
    assert sorted(row for row in short if row is not None) == list(range(32))
    read(manager, 31)
    long = manager.allocate([2] * 7000, 8000)
    assert long is not None
    assert manager.allocate([1], 2) is None
    manager.check_integrity()
    assert manager.free_slots == 0


def test_rows_move_together_where_free_memory_is_in_pieces() -> None:
    manager = manager_of(7, rows=7)
    for first in range(7):
        row = manager.allocate(text(first, 100), 128)
        assert row == first
        state = manager.state("target")
        assert state is not None
        read(manager, row)
        keys, _ = state.store.layer(0)
        keys[torch.from_numpy(state.slots_of(row, 99))] = float(first)
    for row in (0, 2, 4, 6):
        manager.free(row)
    assert manager.allocate(text(9, 300), 4 * KV_QUANTUM) == 0
    manager.check_integrity()
    for row in (1, 3, 5):
        assert state is not None
        assert bool((keys[torch.from_numpy(state.slots_of(row, 99))] == row).all())


def test_who_comes_together_reads_once() -> None:
    manager = manager_of(16, models=("target", "draft"))
    first, second = (manager.allocate(text(1, 300), 300, USE) for _ in range(2))
    assert (first, second) == (0, 1)
    assert manager.leaders() == {1: (0, 299)}
    read(manager, 0, "draft")
    assert manager.follow() == [1]
    assert [manager.inherited(1, name) for name in ("target", "draft")] == [0, 299]
    assert manager.leaders() == {1: (0, 299)}  # of the target something is to come
    read(manager, 0)
    assert manager.follow() == [1]
    assert manager.follow() == []
    assert [manager.inherited(1, name) for name in ("target", "draft")] == [299, 299]
    states = [manager.state(name) for name in ("target", "draft")]
    assert [state.lengths(np.array([1])).tolist() for state in states if state] == [[299], [299]]
    assert manager.leaders() == {}
    assert manager.inherited(1) == 299
    manager.check_integrity()


def test_who_loses_its_leader_finds_what_that_has_read() -> None:
    manager = manager_of(16)
    rows = [manager.allocate(text(1, 300), 300, USE) for _ in range(3)]
    assert manager.leaders() == {1: (0, 299), 2: (0, 299)}
    read(manager, 0)
    manager.free(0, keep=True)
    assert manager.allocate(text(5, 10), 20, USE) == 0  # another request in the leader's row
    assert manager.leaders() == {}
    assert manager.follow() == [1, 2]
    assert [manager.inherited(row) for row in (1, 2)] == [299, 299]
    assert rows == [0, 1, 2]
    manager.check_integrity()


def test_a_copy_that_fails_costs_a_reading(caplog: pytest.LogCaptureFixture) -> None:
    manager = manager_of(16)
    served(manager, text(1, 300))
    manager.allocate(text(3, 10), 10)  # in the place of what is cached
    with (
        caplog.at_level(logging.ERROR),
        mock.patch.object(KVStore, "move", side_effect=RuntimeError("no memory")),
    ):
        assert served(manager, text(1, 300)) == 0
    assert "no memory" in caplog.text
    assert manager.cache_counts.failures == 1
    assert served(manager, text(1, 300)) == 299


def test_a_row_that_cannot_be_placed_leaves_nothing_taken() -> None:
    manager = manager_of(16)
    served(manager, text(1, 300))
    with (
        mock.patch.object(KVStore, "move", side_effect=RuntimeError("no memory")),
        pytest.raises(RuntimeError),
    ):
        manager.allocate(text(3, 10), 10)  # what is cached is in its way
    manager.check_integrity()
    assert manager.free_rows == 4
    assert served(manager, text(1, 300)) == 299


def test_counts_tell_what_was_found() -> None:
    manager = manager_of(16)
    for tokens in (text(1, 300), text(1, 300), text(2, 100)):
        served(manager, tokens)
    counts = manager.cache_counts
    assert (counts.lookups, counts.hits) == (3, 1)
    assert (counts.lookup_tokens, counts.cached_tokens) == (299 + 299 + 99, 299)


def test_nothing_is_moved_to_where_a_row_is_to_stand() -> None:
    """Several prefixes are in the way, and there is no gap before one of them is dropped."""
    manager = StateManager(2, 4 * KV_QUANTUM, kv_slots=8 * KV_QUANTUM)
    manager.open_state("target", LAYERS, canonical=True)
    for first in range(8):
        served(manager, text(first, 120))
    assert manager.allocate(text(9, 300), 4 * KV_QUANTUM, USE) == 0
    manager.check_integrity()
    assert manager.cached_slots == 4 * KV_QUANTUM
