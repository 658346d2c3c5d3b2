"""Models that fail or hang when they are told to."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from modelpool.packed_model import PackedModel
from specrouter.execution.hang_guard import HangGuard

Forward = Callable[..., Tensor]

PATIENCE_S = 30.0


class Faults:
    """Makes the models named in `failing` raise, and those in `hanging` wait for `released`;
    counts the forwards of all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing: set[str] = set()
        self.hanging: set[str] = set()
        self.hangs, self.released = threading.Event(), threading.Event()
        self.forwards: dict[str, int] = {}
        self.delay_s = 0.0
        real: Forward = PackedModel.forward

        def forward(model: PackedModel, *arguments: Any, **options: Any) -> Tensor:
            self.forwards[model.name] = self.forwards.get(model.name, 0) + 1
            time.sleep(self.delay_s)
            if model.name in self.failing:
                raise RuntimeError(f"{model.name} is on fire")
            return real(model, *arguments, **options)

        monkeypatch.setattr(PackedModel, "forward", forward)
        watched = HangGuard.inside

        @contextmanager
        def inside(guard: HangGuard, model: str) -> Iterator[None]:
            with watched(guard, model):
                if model in self.hanging:
                    self.hangs.set()
                    self.released.wait(PATIENCE_S)
                yield

        monkeypatch.setattr(HangGuard, "inside", inside)

    def settled(self, name: str) -> int:
        """Forwards of a model, once there are no more."""
        seen = -1
        while seen != self.forwards[name]:
            seen = self.forwards[name]
            time.sleep(0.1)
        return seen
