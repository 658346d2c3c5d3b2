"""States of models through failures: what a failed model leaves behind is never read."""

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from modelpool import ModelPool
from modelpool.packed_model import PackedModel
from processors import PrefillProcessor, TokenTree
from processors.pack import PackPlan, run_pack
from specrouter.execution.fault_guard import FaultGuard
from specrouter.execution.forward_clock import ForwardClock
from specrouter.execution.hang_guard import HangGuard
from specrouter.execution.model_states import ModelStates, StageError
from specrouter.execution.model_times import ModelTimes
from statemgr import StateManager

ROWS = np.array([0, 1])
TEXTS = ([5, 17, 300, 42, 9], [3, 4])
BROKEN = RuntimeError("broken")


@pytest.fixture
def manager() -> StateManager:
    manager = StateManager(2, 64)
    for text in TEXTS:
        manager.allocate(text, 32)
    return manager


def states_of(pool: ModelPool, manager: StateManager, times: Any) -> ModelStates:
    clock = ForwardClock(lambda *_: None)
    return ModelStates(pool, manager, times, clock, HangGuard(60.0), FaultGuard())


@pytest.fixture
def states(pool: ModelPool, manager: StateManager) -> Iterator[ModelStates]:
    states = states_of(pool, manager, mock.create_autospec(ModelTimes, instance=True))
    states.begin()
    yield states
    assert all(pool.evict(name) for name in ("small", "middle") if pool.is_loaded(name))


def read(states: ModelStates, name: str) -> None:
    """A model reads all texts, but for their last tokens."""
    with states.stage(name, ROWS) as active, torch.inference_mode():
        PrefillProcessor(32).feed(active, ROWS, active.lag(ROWS))


def draft(states: ModelStates, name: str) -> None:
    """A model reads the last tokens of all texts, and two that it has drafted."""
    tree = TokenTree.path(ROWS, np.array([[7, 8], [7, 8]]), np.array([2, 2]))
    plan = PackPlan(ROWS, np.array([1, 1]), np.array([True, True]))
    with states.stage(name, ROWS) as active, torch.inference_mode():
        states.touch(active.state, ROWS, run_pack(active, plan, tree).fed)


def lengths(manager: StateManager, name: str) -> list[int]:
    state = manager.state(name)
    assert state is not None
    return [int(length) for length in state.lengths(ROWS)]


def test_what_goes_wrong_is_put_down_to_the_model(
    states: ModelStates, manager: StateManager
) -> None:
    with pytest.raises(StageError) as raised, states.stage("small", ROWS):
        raise BROKEN
    assert raised.value.failure.model == "small"
    assert raised.value.failure.error is BROKEN
    with pytest.raises(StageError) as raised, states.stage("nobody", ROWS):
        pass
    assert raised.value.failure.model == "nobody"


def test_a_model_that_failed_keeps_what_it_has_read_of_the_committed_text(
    states: ModelStates, manager: StateManager
) -> None:
    read(states, "small")
    with pytest.raises(StageError), states.stage("small", ROWS):
        raise BROKEN
    states.settle()
    assert lengths(manager, "small") == [4, 1]


def assert_read_anew(states: ModelStates, manager: StateManager) -> None:
    """From what was committed before the cycle."""
    manager.check_integrity()
    assert lengths(manager, "small") == [5, 2]
    read(states, "small")
    assert lengths(manager, "small") == [7, 4]
    manager.check_integrity()


def test_what_cannot_be_compared_with_the_committed_text_is_read_anew(
    states: ModelStates, manager: StateManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(states, "small")
    draft(states, "small")
    for row in ROWS.tolist():
        manager.extend(row, np.array([7, 8, 9]))
    with monkeypatch.context() as patch:
        patch.setattr(TokenTree, "on_text", lambda *_: 1 / 0)
        states.settle()
    assert_read_anew(states, manager)


@pytest.mark.parametrize("is_settled", [True, False])
def test_what_is_evicted_is_gone_before_the_next_model_is_loaded(
    is_settled: bool,
    small_config: dict[str, Any],
    manager: StateManager,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = ModelPool.from_config({**small_config["pool"], "max_loaded_models": 2})
    times: Any = SimpleNamespace(learn=lambda *_: None)  # a mock would keep the model
    states = states_of(pool, manager, times)
    states.prepare("target")
    read(states, "small")
    draft(states, "small")
    weights, store = weakref.ref(pool.get("small").model), manager.state("small")
    assert store is not None
    kv = weakref.ref(store.store)
    del store
    left: list[bool] = []
    load = ModelPool._load

    def noting(pool: ModelPool, member: Any) -> PackedModel:
        gc.collect()
        left.extend((weights() is not None, kv() is not None))
        return load(pool, member)

    monkeypatch.setattr(ModelPool, "_load", noting)
    if is_settled:
        states.settle()
    states.prepare("middle")
    assert left == [False, False]
    assert not pool.is_loaded("small")
    states.settle()
    manager.check_integrity()
