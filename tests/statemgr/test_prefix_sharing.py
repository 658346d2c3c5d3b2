"""Rows take over what others have read, under their own salt alone, and never what was rejected."""

import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from statemgr import BLOCK_SLOTS as B
from statemgr import CacheUse, KVStore, ModelState, StateManager, TokenChain
from statemgr.blocks import BlockTables
from tests.kv_layers import kv_layer
from tests.statemgr.sharing_machine import SharingMachine

LAYERS = {0: kv_layer(torch.device("cpu"), torch.float32, 1, 2)}
USE = CacheUse("salt")


def manager_of(blocks: int, rows: int = 4, models: tuple[str, ...] = ("target",)) -> StateManager:
    """Rows of at most 16 blocks, without trees."""
    manager = StateManager(rows, 16 * B, kv_slots=blocks * B)
    for name in models:
        manager.open_state(name, LAYERS, is_target=name == "target")
    return manager


def state_of(manager: StateManager, name: str = "target") -> ModelState:
    state = manager.state(name)
    assert state is not None
    return state


def blocks_of(manager: StateManager, row: int) -> list[int]:
    found: list[int] = state_of(manager).tables.of(row).tolist()
    return found


def text(first: int, length: int) -> list[int]:
    return [first, *range(1000, 1000 + length - 1)]


def read(manager: StateManager, row: int, name: str = "target") -> None:
    """A forward of all tokens of a row but the last one."""
    state, tokens = state_of(manager, name), manager.committed(row)[:-1]
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


def test_what_a_row_has_read_is_found_though_another_will_have_read_more() -> None:
    manager = manager_of(64)
    for length in (100, 200):
        assert manager.allocate(text(1, length), length, CacheUse("salt", reads=False)) is not None
        if length == 100:
            read(manager, 0)
    assert manager.allocate(text(1, 300), 300, USE) == 2
    assert manager.inherited(2) == 99
    assert manager.leaders() == {2: (1, 200)}


def test_what_a_lost_model_alone_had_read_is_given_up() -> None:
    manager = manager_of(64, models=("target", "draft"))
    text_of_both = [*text(1, 200), *range(200)]
    for model, tokens in (("draft", text(1, 200)), ("target", text_of_both)):
        row = manager.allocate(tokens, len(tokens), CacheUse("salt", reads=False))
        assert row is not None
        read(manager, row, model)
        manager.free(row, keep=True)
    assert manager.cached(TokenChain(text_of_both), USE) == {"target": 399, "draft": 199}
    assert manager.cached_slots == 13 * B
    manager.drop_state("target")
    manager.check_integrity()
    assert manager.cached_slots == 7 * B
    assert manager.cached(TokenChain(text_of_both), USE) == {"draft": 199}


@pytest.mark.exact
def test_many_random_lives_share_what_a_naive_account_says(pytestconfig: pytest.Config) -> None:
    lives = pytestconfig.getoption("lives") // 5  # each takes five times as long
    many = settings(max_examples=lives, stateful_step_count=40, deadline=None, database=None)
    run_state_machine_as_test(SharingMachine, settings=many)


def test_a_prefix_is_found_to_the_token_and_its_last_one_is_read_again() -> None:
    manager = manager_of(64)
    assert served(manager, text(1, 300)) == 0
    assert served(manager, text(1, 300)) == 299
    assert served(manager, [*text(1, 200), 7, 8]) == 200
    assert served(manager, text(1, 131)) == 130
    assert served(manager, text(2, 300)) == 0
    assert served(manager, [1]) == 0


def test_whoever_has_another_salt_or_none_finds_nothing() -> None:
    manager = manager_of(64)
    served(manager, text(1, 200))
    for use in (CacheUse("other"), CacheUse(), CacheUse("salt", reads=False)):
        assert served(manager, text(1, 200), use) == 0
    assert manager.cached(TokenChain(text(1, 200)), CacheUse("none of these")) == {}
    assert manager.cached(TokenChain(text(1, 200)), USE) == {"target": 199}


def test_rows_that_begin_alike_have_the_same_blocks_and_copy_the_rest() -> None:
    manager = manager_of(64)
    served(manager, text(1, 300))
    with mock.patch.object(KVStore, "copy", autospec=True) as copy:
        rows = [manager.allocate([*text(1, 100), own, 5], 128, USE) for own in (7, 8)]
    assert rows == [0, 1]
    first, second = blocks_of(manager, 0), blocks_of(manager, 1)
    assert first[:3] == second[:3]
    assert first[3] != second[3]
    assert [manager.inherited(row) for row in (0, 1)] == [100, 100]
    assert [len(call.args[1]) for call in copy.call_args_list] == [4, 4]
    assert manager.cached_slots == 7 * B  # of ten, and three run
    manager.check_integrity()


def test_of_the_least_recently_used_text_the_end_goes_first() -> None:
    manager = manager_of(33)
    for first in (1, 2, 3, 4):
        served(manager, text(first, 250))  # eight blocks each
    assert served(manager, [*text(1, 250), 5]) == 249
    assert manager.cache_counts.evictions == 0
    served(manager, text(5, 90))
    found = [manager.cached(TokenChain(text(n, 250)), USE) for n in (1, 2, 3, 4)]
    assert [each["target"] for each in found] == [249, 6 * B, 249, 249]
    assert manager.cache_counts.evictions == 2


def test_a_block_that_rows_have_is_not_evicted() -> None:
    manager = manager_of(15, rows=2)
    served(manager, text(1, 200))
    assert manager.allocate(text(1, 200), 8 * B, USE) == 0
    assert manager.allocate(text(2, 7 * B), 7 * B, USE) == 1
    read(manager, 1)
    assert not len(manager.grow(np.array([0]), np.array([8 * B])))
    manager.check_integrity()
    assert manager.cached_slots == 0
    assert manager.cached(TokenChain(text(1, 200)), USE) == {"target": 6 * B}


def test_who_comes_together_reads_once() -> None:
    manager = manager_of(64, models=("target", "draft"))
    first, second = (manager.allocate(text(1, 300), 300, USE) for _ in range(2))
    assert (first, second) == (0, 1)
    assert manager.leaders() == {1: (0, 299)}
    read(manager, 0, "draft")
    assert manager.follow() == [1]
    assert [manager.inherited(1, name) for name in ("target", "draft")] == [0, 9 * B]
    assert manager.leaders() == {1: (0, 299)}  # of the target something is to come
    read(manager, 0)
    assert manager.follow() == [1]
    assert manager.follow() == []
    assert [manager.inherited(1, name) for name in ("target", "draft")] == [299, 299]
    states = [state_of(manager, name) for name in ("target", "draft")]
    assert [state.lengths(np.array([1])).tolist() for state in states] == [[299], [299]]
    assert blocks_of(manager, 0)[:9] == blocks_of(manager, 1)[:9]
    assert manager.leaders() == {}
    assert manager.inherited(1) == 299
    manager.check_integrity()


def test_who_loses_its_leader_finds_what_that_has_read() -> None:
    manager = manager_of(64)
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


def test_whole_blocks_are_followed_and_the_rest_is_copied_once() -> None:
    manager = manager_of(64)
    for _ in range(3):
        assert manager.allocate(text(1, 100), 100, USE) is not None
    state, tokens = state_of(manager), manager.committed(0)
    for start in range(0, 99, 11):
        state.append(
            np.array([0]), np.array([11]), tokens[start : start + 11], start + np.arange(11)
        )
        whole = (start + 11) // B * B
        with mock.patch.object(KVStore, "copy", autospec=True) as copy:
            manager.follow()
        assert copy.call_count == (2 if start + 11 == 99 else 0)
        own = state.lengths(np.array([1, 2])).tolist()
        assert own == ([99, 99] if start + 11 == 99 else [whole, whole])
        manager.check_integrity()
    assert blocks_of(manager, 1)[:3] == blocks_of(manager, 0)[:3] == blocks_of(manager, 2)[:3]


def test_what_nobody_but_the_cache_shares_is_the_rows_own_where_no_block_is_free() -> None:
    manager = manager_of(4, rows=1)
    served(manager, text(1, 4 * B))
    row = manager.allocate(text(1, 4 * B), 4 * B, USE)
    assert row == 0
    state = state_of(manager)
    state.rollback(np.array([0]), np.array([0]))
    read(manager, 0)
    manager.check_integrity()
    assert manager.cached(TokenChain(text(1, 4 * B)), USE) == {}


def test_values_that_are_no_numbers_are_not_shared() -> None:
    manager = manager_of(64)
    assert [manager.allocate(text(1, 100), 128, USE) for _ in range(2)] == [0, 1]
    read(manager, 0)
    state = state_of(manager)
    state.store.layer(0)[1][state.slots_of(0, 99)[50]] = torch.nan
    assert manager.follow() == []
    manager.free(0, keep=True)
    assert manager.cached(TokenChain(text(1, 100)), USE) == {}
    manager.check_integrity()


def test_a_copy_that_fails_costs_a_reading(caplog: pytest.LogCaptureFixture) -> None:
    manager = manager_of(64)
    served(manager, text(1, 300))
    with (
        caplog.at_level(logging.ERROR),
        mock.patch.object(KVStore, "copy", side_effect=RuntimeError("no memory")),
    ):
        assert served(manager, text(1, 300)) == 9 * B  # the whole blocks
    assert "no memory" in caplog.text
    assert manager.cache_counts.failures == 1
    assert served(manager, text(1, 300)) == 299


def test_a_row_that_cannot_begin_leaves_nothing_taken() -> None:
    manager = manager_of(64)
    assert manager.allocate(text(1, 300), 300, USE) == 0
    read(manager, 0)
    with (
        mock.patch.object(KVStore, "is_finite", side_effect=RuntimeError("no device")),
        pytest.raises(RuntimeError),
    ):
        manager.allocate(text(1, 300), 300, USE)
    manager.check_integrity()
    assert manager.free_rows == 3
    assert manager.allocate(text(1, 300), 300, USE) == 1
    assert manager.inherited(1) == 299


@pytest.mark.parametrize(
    ("corrupt", "complaint"),
    [
        (lambda tables: tables.hold(np.array([0])), "miscounted"),
        (lambda tables: tables._free.pop(), "lost"),
        (lambda tables: tables.share(1, 0, tables.of(0)[:1]), "of other tokens"),
        (lambda tables: tables.share(1, 3, tables.of(0)[3:]), "may be written to"),
    ],
)
def test_corruption_is_noticed(corrupt: Callable[[BlockTables], Any], complaint: str) -> None:
    manager = manager_of(64)
    for first in (1, 2):
        row = manager.allocate(text(first, 100), 128, USE)
        assert row is not None
        read(manager, row)
    manager.check_integrity()
    corrupt(state_of(manager).tables)
    with pytest.raises(AssertionError, match=complaint):
        manager.check_integrity()
