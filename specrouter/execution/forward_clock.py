"""A clock that measures how long each forward of a model takes.

On a CPU it is the time between call and return. On an accelerator forwards return before they are
computed, so events are put into the stream around each, and read after the stage that ran them has
waited for its results: the clock itself never waits.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

# model, tokens, attended, the mean time in ms of forwards of this size, their number
Report = Callable[[str, int, float, float, int], None]


class _Forward(NamedTuple):
    """A forward; `begin`: its time in ms, or the event before it; `end`: the event after it."""

    began_s: float
    size: tuple[str, int, float]
    begin: Any
    end: Any = None


class _Taken(threading.local):
    """The forwards of one thread that were not reported yet."""

    def __init__(self) -> None:
        self.pending: list[_Forward] = []


class ForwardClock:
    """A clock for forwards; each thread that uses it has the times of its own.

    `report` is called with the forwards when a thread calls `take_ms`.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._taken = _Taken()

    def watch(
        self,
        model: str,
        device: torch.device,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Callable[[int, float], AbstractContextManager[None]]:
        """Return a value for `PackedModel.watch`; `around` is entered inside it at each forward."""

        @contextmanager
        def inside(tokens: int, attended: float) -> Iterator[None]:
            began_s, size = time.perf_counter(), (model, tokens, attended)
            if device.type == "cpu":
                with around():
                    yield
                elapsed_ms = (time.perf_counter() - began_s) * 1000
                self._taken.pending.append(_Forward(began_s, size, elapsed_ms))
                return
            event: Any = torch.cuda.Event  # has types in some versions only
            begin, end = event(enable_timing=True), event(enable_timing=True)
            stream = torch.cuda.current_stream(device)  # `record` takes the current device's
            begin.record(stream)
            with around():
                yield
            end.record(stream)
            self._taken.pending.append(_Forward(began_s, size, begin, end))

        return inside

    def take_ms(self, since_s: float = -math.inf, until_s: float = math.inf) -> float:
        """Report this thread's forwards that began up to `until_s`; return the time of some.

        These are the ones that began at `since_s` or later, by `time.perf_counter`. It is called
        after a stage has waited for its results; a forward that is still computed is reported
        later.
        """
        pending, self._taken.pending = self._taken.pending, []
        seen, total_ms = dict[tuple[str, int, float], list[float]](), 0.0
        for forward in pending:
            began_s, size, begin, end = forward
            if began_s > until_s or (end is not None and not end.query()):
                self._taken.pending.append(forward)
                continue
            elapsed_ms = begin if end is None else begin.elapsed_time(end)
            seen.setdefault(size, []).append(elapsed_ms)
            total_ms += elapsed_ms if began_s >= since_s else 0.0
        for size, times_ms in seen.items():
            self._report(*size, sum(times_ms) / len(times_ms), len(times_ms))
        return total_ms

    def own_ms(self, started_s: float, ended_s: float) -> float:
        """Return the time between the two, by `time.perf_counter`, that was not spent in forwards.

        It is called after a stage has waited for its results.
        """
        elapsed_ms = (ended_s - started_s) * 1000
        return max(elapsed_ms - self.take_ms(started_s, ended_s), 1e-3)
