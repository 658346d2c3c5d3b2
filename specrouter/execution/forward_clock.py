"""ForwardClock: how long each forward of a model takes.

On a CPU that is the time between a forward's beginning and its return. On an accelerator forwards
return before they are computed, so events are put into the stream around each, and read when the
stage that ran them has waited for its results: the clock itself never waits.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from specrouter.execution.fault_guard import FaultGuard

# model, tokens, attended, the mean time in ms of forwards of this size, their number
Report = Callable[[str, int, float, float, int], None]


class _Taken(threading.local):
    """The forwards of one thread that nobody has been told of."""

    def __init__(self) -> None:
        self.pending: list[tuple[str, int, float, Any, Any]] = []
        self.seen: dict[tuple[str, int, float], list[float]] = {}


class ForwardClock:
    """Each thread that uses it has the times of its own forwards; a clock that fails is no failure
    of the forward.

    Args: `report` is told of forwards when `take_ms` is called, in any of the threads.
    """

    def __init__(self, report: Report, faults: FaultGuard | None = None) -> None:
        self._report = report
        self._faults = faults or FaultGuard()
        self._taken = _Taken()

    def watch(
        self,
        model: str,
        device: torch.device,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Callable[[int, float], AbstractContextManager[None]]:
        """What `PackedModel.watch` is to be; `around` is entered inside, around the forward."""

        @contextmanager
        def inside(tokens: int, attended: float) -> Iterator[None]:
            if device.type == "cpu":
                started = time.perf_counter()
                with around():
                    yield
                with self._faults.part("timing"):
                    self._note(model, tokens, attended, (time.perf_counter() - started) * 1000)
                return
            event: Any = torch.cuda.Event  # typed in some versions only
            begin, end = event(enable_timing=True), event(enable_timing=True)
            stream = torch.cuda.current_stream(device)  # `record` takes the current device's
            begin.record(stream)
            with around():
                yield
            end.record(stream)
            self._taken.pending.append((model, tokens, attended, begin, end))

        return inside

    def take_ms(self) -> float:
        """The time of all forwards of this thread that have ended since the last call.

        For after a stage has waited for them. One whose results nobody has looked at may still be
        computed: it is told later.
        """
        taken = self._taken
        pending, taken.pending = taken.pending, []
        for forward in pending:
            model, tokens, attended, begin, end = forward
            if end.query():
                self._note(model, tokens, attended, begin.elapsed_time(end))
            else:
                taken.pending.append(forward)
        seen, taken.seen = taken.seen, {}
        for (model, tokens, attended), times_ms in seen.items():
            self._report(model, tokens, attended, sum(times_ms) / len(times_ms), len(times_ms))
        return sum(map(sum, seen.values()))

    def own_ms(self, started: float) -> float:
        """The time since `started`, by `time.perf_counter`, that was not spent in forwards.

        For after a stage has waited for them; `take_ms` was called when it started.
        """
        elapsed_ms = (time.perf_counter() - started) * 1000
        return max(elapsed_ms - self.take_ms(), 1e-3)

    def _note(self, model: str, tokens: int, attended: float, elapsed_ms: float) -> None:
        self._taken.seen.setdefault((model, tokens, attended), []).append(elapsed_ms)
