"""The thread that runs the decoding cycles until it is closed or the engine fails.

Contract: every request that it takes ends in one last delta. The engine ends after a failure that
it cannot recover from: a cycle that fails, a forward of a drafter that does not return, a cycle
that does not end. All requests then end with the reason, and no more are taken; a supervisor has to
restart the process. Any thread may call it.

Not here: which requests are accepted (`InputValidation`), and what a cycle does (`Engine`).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from modelpool.errors import ConfigError
from specrouter.engine.engine import Engine
from specrouter.engine.engine_state import EngineState
from specrouter.execution.model_states import StageError
from specrouter.request.errors import EngineDeadError, OverloadedError, UnavailableError
from specrouter.request.running import RunningRequest

logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # longest time between two checks for a hang
# The next drafter is loaded after `_QUIET_S` without work, or after `_BUSY_S` with requests that
# run all the time; they wait while it is loaded.
_QUIET_S, _BUSY_S = 1.0, 30.0


class EngineThread:
    """The engine's thread, and the one that watches it; start it once, and close it.

    Args:
        engine: runs in the thread.
        step_timeout_s: the most time that a cycle may take.
        loads_later: load drafters one by one between cycles, while requests are served; else
            before the first request.

    Attributes:
        failure: why the engine has failed; None while it runs, and after a close.
    """

    def __init__(self, engine: Engine, step_timeout_s: float, loads_later: bool = False) -> None:
        self.engine = engine
        self.failure: str | None = None
        self._step_timeout_s = step_timeout_s
        self._loads_later = loads_later
        self._wakeup = threading.Condition()
        self._arrived: deque[RunningRequest] = deque()
        self._calls = _CallQueue()  # functions to run between steps
        self._closing = False
        self._finishing = False
        self._hangs = False  # the watching thread had to end the requests
        self._ready: Future[None] = Future()  # set when models are loaded
        self._ended = threading.Event()
        self._cpu_threads = torch.get_num_threads()
        self._thread = self._made("engine", self._load_and_run)
        self._watch = self._made("watch", self._look_for_hangs)

    def start(self) -> None:
        """Start the threads; return when the models are loaded, or only the target (`loads_later`).

        Raises the target's load error, or `ConfigError` if there is no memory for its state.
        """
        self._thread.start()
        try:
            self._ready.result()
        except BaseException:  # an interrupted notebook cell, for example, could not close it later
            with self._wakeup:
                self._closing = True
                self._wakeup.notify()
            raise

    @property
    def is_healthy(self) -> bool:
        return self.failure is None and not self._closing

    def state(self) -> EngineState:
        """Return the engine's state; `waiting` includes requests that it has not taken yet."""
        state = self.engine.state()
        return replace(state, waiting=state.waiting + len(self._arrived))

    def enqueue(self, requests: Sequence[RunningRequest], max_waiting: int | None) -> None:
        """Queue all requests or none; raises what `check_room` raises."""
        with self._wakeup:
            self.check_room(max_waiting)
            self._arrived.extend(requests)
            self._wakeup.notify()

    def check_room(self, max_waiting: int | None) -> None:
        """Check that requests can be queued now; free rows are subtracted from those that wait.

        Raises:
            OverloadedError: `max_waiting` requests or more wait.
            UnavailableError: it is closed; `EngineDeadError`: it has failed.
        """
        if not self.is_healthy:
            raise self._gone()
        waiting = len(self._arrived) + self.engine.waiting - self.engine.free_rows
        if max_waiting is not None and waiting >= max_waiting:
            raise OverloadedError(waiting, self.engine.seconds_until_admitted(waiting))

    def seconds_until_admitted(self) -> float:
        """Return the expected wait for a row of a request that comes now; 0.0 if one is free."""
        waiting = len(self._arrived) + self.engine.waiting - self.engine.free_rows
        return 0.0 if waiting < 0 else self.engine.seconds_until_admitted(waiting + 1)

    def wake(self) -> None:
        """Wake the engine's thread, because a request was cancelled."""
        with self._wakeup:
            self._wakeup.notify()

    def run_idle(self, function: Callable[[], Any]) -> Any:
        """Run a function between cycles; see `EngineInstruments.run_idle`."""
        if threading.current_thread() is self._thread:
            return function()
        with self._wakeup:
            if not self.is_healthy:
                raise self._gone()
            result = self._calls.add(function)
            self._wakeup.notify()
        return result.result()

    def close(self, patience_s: float | None = None) -> None:
        """End all requests as "cancelled", and the threads.

        If the running cycle does not end within `patience_s`, it is abandoned, and its requests end
        with an error.
        """
        with self._wakeup:
            self._closing = True
            self._wakeup.notify()
        if threading.current_thread() in (self._thread, self._watch):
            return  # called by the garbage collector in that thread, which ends by itself
        if not self._ended.wait(patience_s):
            self._finish("the engine did not stop when it was closed")
        self._ended.wait()
        # A thread that is still in torch when the interpreter ends would abort the process, so both
        # are joined, unless the engine's thread hangs.
        for thread in (self._thread, self._watch):
            if thread.ident is not None and not (thread is self._thread and self._hangs):
                thread.join()

    def _made(self, role: str, target: Callable[[], None]) -> threading.Thread:
        """Return a thread with the creating thread's number of torch threads.

        A new thread otherwise gets the number that any thread has set last, for its model.
        """

        def run() -> None:
            torch.set_num_threads(self._cpu_threads)
            target()

        return threading.Thread(target=run, name=f"specrouter-{role}", daemon=True)

    def _load_and_run(self) -> None:
        """Load the models and serve; the body of the engine's thread.

        A thread that uses torch starts OpenMP workers of its own, and with more of them than cores
        libgomp's workers sleep at every barrier instead of spinning: a forward of 29 ms took 34 ms
        when the caller's thread had loaded the model.
        """
        try:
            self.engine.warm_up()
        except BaseException as error:
            self._ended.set()
            self._ready.set_exception(_config_error(error) or error)
            return
        self._watch.start()
        try:
            self._serve()
        except BaseException as error:
            if not self._finishing:  # else it has hung, and the requests have already ended
                logger.exception("the engine has failed")
            self._finish(f"{type(error).__name__}: {error}")
        else:
            self._finish(None)

    def _serve(self) -> None:
        """Run cycles, and sleep while there is no work; return when it is closed."""
        engine = self.engine
        engine.await_drafters()
        while engine.awaited and not (self._loads_later or self._closing):
            engine.load_next()
        if not self._closing:
            self._ready.set_result(None)
        loaded_s = time.monotonic()
        while self._wait_for_work():
            is_busy = engine.has_work and time.monotonic() - loaded_s < _BUSY_S
            if self._calls:
                self._calls.run_next()
            elif engine.awaited and not is_busy:
                engine.load_next()
                loaded_s = time.monotonic()
            else:
                engine.step()

    def _wait_for_work(self) -> bool:
        """Wait for work and give new requests to the engine; return False when it is to close.

        If a drafter is yet to be loaded, it returns without work after `_QUIET_S`.
        """
        with self._wakeup:
            while not (self._closing or self._arrived or self.engine.has_work or self._calls):
                if not self._wakeup.wait(_QUIET_S if self.engine.awaited else None):
                    break
            while self._arrived:  # removed only once queued: if that fails, `_finish` ends it
                self.engine.enqueue(self._arrived[0])
                self._arrived.popleft()
            return not self._closing

    def _look_for_hangs(self) -> None:
        guard, limit_s = self.engine.guard, self._step_timeout_s
        while not self._ended.wait(min(_LOOK_S, guard.limit_s / 4, limit_s / 4)):
            hung = guard.overdue()
            if hung is not None:
                self._finish(f"a forward of {hung} has taken more than {guard.limit_s:g} s")
            elif self.engine.step_s > limit_s:
                self._finish(f"a cycle has taken more than {limit_s:g} s")

    def _finish(self, cause: str | None) -> None:
        """End what is left, with `cause` if the engine failed or hangs; later calls do nothing."""
        with self._wakeup:
            if self._finishing:
                return
            self._finishing = True
            self._hangs = threading.current_thread() is not self._thread
            self.failure = cause
            self._closing = True
            arrived, self._arrived = list(self._arrived), deque()
        if self._hangs:
            logger.critical("the engine is stuck: %s", cause)
        try:
            for request in arrived:
                self.engine.enqueue(request)
            if cause is None:
                self.engine.cancel_all()
            else:
                self.engine.abandon(cause)
        except Exception as error:
            logger.exception("requests could not be ended as they should")
            self.engine.abandon(f"{type(error).__name__}: {error}", arrived)
        finally:
            self._calls.close(self._gone())
            if not self._ready.done():  # closed or failed while it loaded drafters
                self._ready.set_exception(self._gone())
            self._ended.set()

    def _gone(self) -> UnavailableError:
        if self.failure is None:
            return UnavailableError("the router is closed")
        return EngineDeadError(self.failure)


class _CallQueue:
    """Functions of other threads that run in the engine's thread, between its steps.

    Every call gets one answer: its result, its exception, or an error that the engine has ended.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._running: Future[Any] | None = None

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, function: Callable[[], Any]) -> "Future[Any]":
        result: Future[Any] = Future()
        self._waiting.append((function, result))
        return result

    def run_next(self) -> None:
        function, result = self._waiting.popleft()
        self._running = result
        with suppress(InvalidStateError):  # it has hung, and `close` has answered the caller
            try:
                value = function()
            except BaseException as error:  # for the caller to handle, `SystemExit` too
                result.set_exception(error)
            else:
                result.set_result(value)

    def close(self, error: Exception) -> None:
        """Answer the call that runs, and all that wait, with `error`."""
        left = [result for _, result in self._waiting]
        self._waiting.clear()
        for result in (self._running, *left):
            with suppress(InvalidStateError):
                if result is not None:
                    result.set_exception(error)


def _config_error(error: BaseException) -> ConfigError | None:
    """Return the configuration error behind a failure to open the target's state, or None.

    It is that memory has run out, or that drafters ask for layers that the target does not have.
    """
    cause = error.__cause__
    if isinstance(error, StageError) and isinstance(cause, ConfigError):
        return cause
    if not isinstance(error, StageError) or not _is_out_of_memory(cause):
        return None
    reason = (
        "no memory for the target's keys and values, or to run it: fewer requests, or a shorter "
        f"engine.max_model_len, need less ({cause})"
    )
    found = ConfigError("engine.max_requests", reason)
    found.__cause__ = error
    return found


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether memory has run out; on a CPU torch has no exception class for that."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
