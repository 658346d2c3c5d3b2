"""EngineThread: runs the decoding cycles, and sees to it that they go on.

Contract: every request that it takes ends in one last delta. An engine that crashes ends what ran
and is replaced by its successor, which serves what waited. One that keeps crashing, or whose cycle
does not end, is the last one: every request is told why, and no more are taken. A thread that hangs
in a drafter's forward is left behind, and another one goes on. Callers may be any threads.

Not here: which requests are accepted (`InputValidation`), and what a cycle does (`Engine`).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from specrouter.engine.call_queue import CallQueue
from specrouter.engine.engine import Engine
from specrouter.engine.engine_state import EngineState
from specrouter.engine.start_failure import config_error
from specrouter.engine.watchdog import Watchdog
from specrouter.engine.worker_threads import WorkerThreads
from specrouter.execution.hang_guard import Abandoned
from specrouter.request.errors import OverloadedError, UnavailableError
from specrouter.request.running import RunningRequest

logger = logging.getLogger(__name__)

_MOST_CRASHES, _CRASHES_S = 3, 600.0  # of the engine within so many seconds; then it stays down


class EngineThread:
    """Start it once; close it.

    Attributes, to be read:
        engine: the one that runs now.
        failure: why it has stopped for good; None while it runs, and after a close.
        restarts: times that an engine has failed and another one begun.
    """

    def __init__(self, engine: Engine, step_timeout_s: float) -> None:
        self.engine = engine
        self.failure: str | None = None
        self.restarts = 0
        self._step_timeout_s = step_timeout_s
        self._wakeup = threading.Condition()
        self._arrived: deque[RunningRequest] = deque()
        self._calls = CallQueue()  # that are run between steps
        self._closing = False
        self._stuck = False  # in a cycle that nothing can end
        self._crashes: deque[float] = deque(maxlen=_MOST_CRASHES)  # when an engine failed
        self._ready: Future[None] = Future()  # the models are loaded that are to be
        self._ended = threading.Event()
        self._threads = WorkerThreads()

    def start(self) -> None:
        """Returns when models are loaded (`Engine.preload`).

        Raises what is wrong with the target; `ConfigError` where its state has no memory.
        """
        self._threads.start("engine", self._load_and_run)
        try:
            self._ready.result()
        except BaseException:  # a notebook's cell is interrupted, say: nobody could close it
            with self._wakeup:
                self._closing = True
                self._wakeup.notify()
            raise

    @property
    def is_healthy(self) -> bool:
        return self.failure is None and not self._closing

    def state(self) -> EngineState:
        """The engine's, with the requests that it has not taken yet."""
        state = self.engine.state()
        return replace(state, waiting=state.waiting + len(self._arrived))

    def enqueue(self, requests: Sequence[RunningRequest], max_waiting: int | None) -> None:
        """All of them or none.

        Raises: see `check_room`.
        """
        with self._wakeup:
            self.check_room(max_waiting)
            self._arrived.extend(requests)
            self._wakeup.notify()

    def check_room(self, max_waiting: int | None) -> None:
        """Whether it would take requests now; those that will be admitted at once do not count.

        Raises:
            OverloadedError: more wait than `max_waiting` - 1.
            UnavailableError: it is closed or has failed.
        """
        if not self.is_healthy:
            raise UnavailableError(self.failure or "the router is closed")
        waiting = len(self._arrived) + self.engine.waiting - self.engine.free_rows
        if max_waiting is not None and waiting >= max_waiting:
            raise OverloadedError(waiting, self.engine.seconds_until_admitted(waiting))

    def seconds_until_admitted(self) -> float:
        """Of a request that comes now; 0.0 where a row is free."""
        waiting = len(self._arrived) + self.engine.waiting - self.engine.free_rows
        return 0.0 if waiting < 0 else self.engine.seconds_until_admitted(waiting + 1)

    def wake(self) -> None:
        """Looks at the requests again, of which one was cancelled."""
        with self._wakeup:
            self._wakeup.notify()

    def run_idle(self, function: Callable[[], Any]) -> Any:
        """See `EngineInstruments.run_idle`."""
        with self._wakeup:
            if not self.is_healthy:
                raise UnavailableError(self.failure or "the router is closed")
            result = self._calls.add(function)
            self._wakeup.notify()
        return result.result()

    def close(self, patience_s: float | None = None) -> None:
        """Ends what runs with "cancelled", and the threads.

        A cycle that goes on for `patience_s` longer is left behind, and its requests end with an
        error.
        """
        with self._wakeup:
            self._closing = True
            self._wakeup.notify()
        if threading.current_thread() in self._threads:
            return  # a collection of garbage found the router there: it ends by itself
        if not self._ended.wait(patience_s):
            self._leave_behind("the engine did not stop when it was closed")
        self._threads.join(but="engine" if self._stuck else None)

    def _load_and_run(self) -> None:
        """The engine's thread. It loads the models too.

        A thread that uses torch starts OpenMP workers of its own, and with more of them than cores
        libgomp's workers sleep at every barrier instead of spinning: a forward of 29 ms took 34 ms
        where the caller's thread had loaded the model.
        """
        try:
            self.engine.warm_up()
        except BaseException as error:
            self._ended.set()
            self._ready.set_exception(config_error(error) or error)
            return
        watchdog = Watchdog(
            lambda: self.engine,
            self._step_timeout_s,
            self._ended,
            lambda hung: self._threads.start("engine", self._run, hung),
            self._leave_behind,
        )
        self._threads.start("watch", watchdog.watch)
        self._run()

    def _run(self, hung: str | None = None) -> None:
        """Serves until it is closed or the engine fails for good, and ends what is left.

        `hung`: takes over from a thread that hangs in a forward of this model.
        """
        try:
            cause = self._serve(hung)
            while cause is not None and not self._stuck and self._begins_anew(cause):
                cause = self._serve()
        except Abandoned:
            return  # another thread has taken over
        except BaseException as error:
            logger.exception("the engine's thread has failed")
            cause = f"{type(error).__name__}: {error}"
        if not self._stuck:  # else all have been told
            self._finish(cause)

    def _serve(self, hung: str | None = None) -> str | None:
        """Sleeps while there is nothing to do. Returns why the engine failed, if it did."""
        try:
            if hung is not None:
                self._calls.give_up(TimeoutError(f"a forward of {hung} hangs"))
                self.engine.take_over(hung)
            if not (self._ready.done() or self._closing):
                self.engine.preload()
                self._ready.set_result(None)
            while self._wait_for_work():
                if self._calls:
                    self._calls.run_next()
                else:
                    self.engine.step()
        except Abandoned:
            raise
        except BaseException as error:
            logger.exception("the engine has failed")
            return f"{type(error).__name__}: {error}"
        return None

    def _wait_for_work(self) -> bool:
        """Hands over what arrived; False when it is to close."""
        with self._wakeup:
            while not (self._closing or self._arrived or self.engine.has_work or self._calls):
                self._wakeup.wait()
            while self._arrived:  # one that cannot be queued is not lost: it is told with the rest
                self.engine.enqueue(self._arrived[0])
                self._arrived.popleft()
            return not self._closing

    def _begins_anew(self, cause: str) -> bool:
        """Ends the requests that ran when the engine failed, and puts another one in its place.

        It serves those that waited. Not if engines fail all the time.
        """
        self.engine.abandon_running(cause)
        now = time.monotonic()
        self._crashes.append(now)
        if len(self._crashes) == _MOST_CRASHES and now - self._crashes[0] < _CRASHES_S:
            logger.error("the engine has failed %d times and stays down", _MOST_CRASHES)
            return False
        try:
            engine = self.engine.successor()
            engine.warm_up()
        except BaseException:
            logger.exception("the engine cannot begin anew")
            return False
        with self._wakeup:
            self.engine = engine
            self.restarts += 1
        logger.warning("the engine has begun anew")
        return True

    def _finish(self, cause: str | None) -> None:
        """Ends what is left, with `cause` if the engine failed."""
        with self._wakeup:
            self.failure = cause
            self._closing = True
            arrived, self._arrived = list(self._arrived), deque()
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
            gone = UnavailableError(cause or "the router is closed")
            self._calls.close(gone)
            if not self._ready.done():  # it failed while it loaded drafters
                self._ready.set_exception(gone)
            self._ended.set()

    def _leave_behind(self, cause: str) -> None:
        """Ends everything while the engine's thread is stuck, which nothing can stop."""
        logger.critical("%s: the engine is stuck", cause)
        self._stuck = True
        self._finish(cause)
