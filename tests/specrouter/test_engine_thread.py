"""Errands of the engine's thread. How it serves, begins anew and ends: `test_router`."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from specrouter.engine_thread import EngineThread
from tests.specrouter.fake_router import FakeEngine


@pytest.fixture
def thread() -> Iterator[EngineThread]:
    pool: Any = SimpleNamespace(target="big", get=lambda name: None)
    engine: Any = FakeEngine()
    thread = EngineThread(engine, pool, step_timeout_s=60.0)
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


def test_who_has_heard_of_an_errand_may_have_another_one(
    thread: EngineThread, busy_switching: None
) -> None:
    for _ in range(3000):
        assert thread.run_idle(lambda: 1) == 1


def test_what_an_errand_raises_reaches_who_asked_and_not_the_engine(thread: EngineThread) -> None:
    with pytest.raises(ZeroDivisionError):
        thread.run_idle(lambda: 1 / 0)
    assert thread.run_idle(lambda: 1) == 1
    assert thread.restarts == 0
