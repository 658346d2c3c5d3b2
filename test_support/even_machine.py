"""A machine on which forwards take the same time everywhere, whatever else runs there."""

import functools
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest import mock

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
    clock, original = MachineClock(), PackedModel._threads_for

    def threads_for(model: PackedModel, tokens: int) -> AbstractContextManager[None]:
        """Within what a forward is measured by."""
        clock.passes(_TARGET_S if model.name == "target" else _DRAFTER_S)
        return original(model, tokens)

    with (
        mock.patch.object(PackedModel, "_threads_for", threads_for),
        mock.patch.object(time, "perf_counter", clock),
        # Their own clocks are bound when they are imported.
        mock.patch.object(router, "RunningRequest", functools.partial(RunningRequest, clock=clock)),
        mock.patch.object(
            model_times, "profile_model", functools.partial(profile_model, clock=clock)
        ),
        # Kept curves are the real machine's.
        mock.patch.object(model_times, "factor_now", return_value=None),
    ):
        yield clock
