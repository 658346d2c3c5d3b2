"""Models that fail, hang or wait when they are told to."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from modelpool.forward import ForwardOutput
from modelpool.packed_model import PackedModel
from specrouter.engine import engine_thread
from specrouter.execution.hang_guard import HangGuard

Forward = Callable[..., ForwardOutput]

PATIENCE_S = 60.0  # until something that must happen has not happened


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.002)


def seem_endless(guard: HangGuard) -> None:
    """The forward that this thread is in has gone on for ever, whatever the guard's limit."""
    assert guard._running is not None
    guard._running = guard._running[0], -math.inf


class Hold:
    """Where the forwards of a model wait. A request whose cycles need one is still running then,
    however slow or fast the machine is."""

    def __init__(self, forwards: int) -> None:
        self._changed = threading.Condition()
        self._may_pass: float = forwards
        self._waiting = 0

    def enter(self) -> None:
        """Before a forward."""
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            is_let = self._changed.wait_for(lambda: self._may_pass > 0, PATIENCE_S)
            self._waiting -= 1
            self._may_pass -= 1
        assert is_let, "nobody lets this forward pass"

    def let_pass(self, forwards: int = 1) -> None:
        """Returns when so many more have passed and another one waits."""
        with self._changed:
            self._may_pass += forwards
            self._changed.notify_all()
            is_next = self._changed.wait_for(
                lambda: bool(self._waiting) and not self._may_pass, PATIENCE_S
            )
        assert is_next, "no further forward comes"

    def leave(self) -> None:
        with self._changed:
            self._may_pass = math.inf
            self._changed.notify_all()


class Faults:
    """Makes the models named in `failing` raise, and those in `hanging` wait for `released`, which
    seems endless to the guard; counts the forwards of all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing: set[str] = set()
        self.hanging: set[str] = set()
        self.hangs, self.released = threading.Event(), threading.Event()
        self.forwards: dict[str, int] = {}
        self._holds: dict[str, Hold] = {}
        real: Forward = PackedModel.forward

        def forward(model: PackedModel, *arguments: Any, **options: Any) -> ForwardOutput:
            self.forwards[model.name] = self.forwards.get(model.name, 0) + 1
            hold = self._holds.get(model.name)
            if hold is not None:
                hold.enter()
            if model.name in self.failing:
                raise RuntimeError(f"{model.name} is on fire")
            return real(model, *arguments, **options)

        monkeypatch.setattr(PackedModel, "forward", forward)
        monkeypatch.setattr(engine_thread, "_LOOK_S", 0.02)
        watched = HangGuard.inside

        @contextmanager
        def inside(guard: HangGuard, model: str) -> Iterator[None]:
            with watched(guard, model):
                if model in self.hanging:
                    seem_endless(guard)
                    self.hangs.set()
                    self.released.wait(PATIENCE_S)
                yield

        monkeypatch.setattr(HangGuard, "inside", inside)

    @contextmanager
    def holding(self, model: str = "target", forwards: int = 1) -> Iterator[Hold]:
        """So many more forwards of a model pass, further ones wait until this is left.

        One forward of the target is what a short prompt's first token takes.
        """
        hold = self._holds[model] = Hold(forwards)
        try:
            yield hold
        finally:
            del self._holds[model]
            hold.leave()
