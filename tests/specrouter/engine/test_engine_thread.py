"""Calls that the engine's thread runs. How it fails: `test_engine_death`."""

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from modelpool.errors import ConfigError
from specrouter.engine.engine_thread import EngineThread
from specrouter.execution.model_states import StageError
from specrouter.request.errors import EngineDeadError
from tests.specrouter.fake_router import FakeEngine
from tests.specrouter.faults import PATIENCE_S


@pytest.fixture
def thread() -> Iterator[EngineThread]:
    engine: Any = FakeEngine()
    thread = EngineThread(engine, step_timeout_s=60.0)
    thread.start()
    yield thread
    thread.close()


@pytest.fixture
def busy_switching() -> Iterator[None]:
    """Threads take turns as often as they can, so that each may be seen between any two steps."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_who_has_heard_of_a_call_may_have_another_one(
    thread: EngineThread, busy_switching: None
) -> None:
    for _ in range(3000):
        assert thread.run_idle(lambda: 1) == 1


@pytest.mark.parametrize(
    "error", [ZeroDivisionError(), SystemExit(3), KeyboardInterrupt(), GeneratorExit()]
)
def test_what_a_call_raises_reaches_who_asked_and_not_the_engine_and_it_is_not_run_again(
    thread: EngineThread, error: BaseException
) -> None:
    runs: list[int] = []

    def call() -> None:
        runs.append(1)
        raise error

    with pytest.raises(type(error)):
        thread.run_idle(call)
    assert thread.run_idle(lambda: len(runs)) == 1


def test_a_call_that_hangs_in_a_forward_ends_the_engine_and_has_no_result(
    thread: EngineThread,
) -> None:
    release = threading.Event()
    engine: Any = thread.engine
    engine.guard.limit_s = 0.2

    def call() -> None:
        with engine.guard.inside("small"):
            release.wait(PATIENCE_S)

    with pytest.raises(EngineDeadError, match="small"):
        thread.run_idle(call)
    assert not thread.is_healthy
    release.set()


def test_a_router_that_is_dropped_in_the_engines_own_thread_is_not_waited_for(
    thread: EngineThread,
) -> None:
    """The collector of garbage runs in any thread."""
    assert thread.run_idle(thread.close) is None
    assert thread._ended.wait(PATIENCE_S)
    assert thread.failure is None


def test_a_load_that_is_interrupted_ends_when_the_models_are_there() -> None:
    """As a notebook's cell is: nobody holds what could be closed."""
    loaded = threading.Event()
    engine: Any = FakeEngine()
    engine.warm_up = lambda: loaded.wait(PATIENCE_S)
    thread = EngineThread(engine, step_timeout_s=60.0)

    def interrupted() -> None:
        raise KeyboardInterrupt

    thread._ready.result = interrupted  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        thread.start()
    loaded.set()
    assert thread._ended.wait(PATIENCE_S)
    assert not thread.is_healthy


def start_failing(cause: Exception) -> None:
    """Starts an engine whose target cannot be made ready."""

    def warm_up() -> None:
        try:
            raise cause
        except Exception as error:
            raise StageError("big", error) from error

    engine: Any = FakeEngine()
    engine.warm_up = warm_up
    EngineThread(engine, step_timeout_s=60.0).start()


def cpu_out_of_memory() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(2**58)
    return caught.value


@pytest.mark.parametrize("of", [lambda: torch.OutOfMemoryError("no room"), cpu_out_of_memory])
def test_a_start_without_memory_for_the_targets_state_names_what_to_change(
    of: Callable[[], Exception],
) -> None:
    cause = of()
    with pytest.raises(ConfigError, match=r"engine\.max_model_len") as caught:
        start_failing(cause)
    assert caught.value.field == "engine.max_requests"
    assert str(cause) in str(caught.value)


def test_a_start_that_fails_otherwise_says_how() -> None:
    with pytest.raises(StageError):
        start_failing(RuntimeError("broken"))
