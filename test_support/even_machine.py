"""A machine on which forwards take the same time everywhere, whatever else runs there."""

import functools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from modelpool.forward import ForwardOutput
from modelpool.packed_model import PackedModel
from specrouter import router
from specrouter.execution import model_times
from specrouter.execution.time_profile import profile_model
from specrouter.request.running import RunningRequest

# What takes time: forwards, and a look at the clock. Drafts pay clearly: where the target alone is
# about as fast, the scheduler leaves drafters out with good reason.
_TARGET_S, _DRAFTER_S, _LOOK_S = 8e-3, 1e-3, 1e-5


class MachineClock:
    """In the place of `time.perf_counter`, by which the engine measures."""

    def __init__(self) -> None:
        self._now_s, self._lock = 0.0, threading.Lock()

    def __call__(self) -> float:
        return self.passes(_LOOK_S)

    def passes(self, seconds: float) -> float:
        with self._lock:
            self._now_s += seconds
            return self._now_s


@contextmanager
def even_machine() -> Iterator[MachineClock]:
    """Forwards take the clock's time, and so does all that is measured."""
    clock, original = MachineClock(), PackedModel.forward

    def forward(model: PackedModel, *arguments: Any, **options: Any) -> ForwardOutput:
        output = original(model, *arguments, **options)
        clock.passes(_TARGET_S if model.name == "target" else _DRAFTER_S)
        return output

    with (
        mock.patch.object(PackedModel, "forward", forward),
        mock.patch.object(time, "perf_counter", clock),
        # Their own clocks are bound when they are imported.
        mock.patch.object(router, "RunningRequest", functools.partial(RunningRequest, clock=clock)),
        mock.patch.object(
            model_times, "profile_model", functools.partial(profile_model, clock=clock)
        ),
    ):
        yield clock
