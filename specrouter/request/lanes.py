"""Lanes: the threads that do what takes long for requests that are not queued yet.

Contract: what is large has a lane of its own, one thread wide, so that it neither holds up what is
small nor has its memory taken several times at once. When something large is done, memory that
nobody uses goes back to the system. Jobs of a lane begin in the order in which they came.
"""

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, Literal, TypeVar

from specrouter.request.errors import OverloadedError, UnavailableError

Result = TypeVar("Result")

# "requests": to read a request, tokenize and check it. "large": one of more than
# `LONG_CHARACTERS`. "structures": one whose grammar is to be compiled. "tokenize": for clients that
# want the tokens only.
Lane = Literal["requests", "large", "structures", "tokenize"]

LONG_CHARACTERS = 2**18  # of a prompt, or bytes of a body
MAX_WAITING_TOKENIZE = 64  # requests
_THREADS: dict[Lane, int] = {
    "requests": 8,
    "large": 1,
    "structures": 2,
    "tokenize": 1,
}
_LEAVE_MEMORY: Collection[Lane] = ("large", "tokenize")  # much of it, behind a job
_RETRY_AFTER_S = 1.0
_DELAY_S = 1.0  # for other large jobs that are done meanwhile
_PAUSE_S = 5.0  # between two times that memory goes back, since threads that allocate wait for it


def lane_of(length: int) -> Lane:
    """Of a request of so many characters, or bytes, in all."""
    return "large" if length > LONG_CHARACTERS else "requests"


class Lanes:
    """Close them. Threads begin with a lane's first job."""

    def __init__(self) -> None:
        self._executors = {
            lane: ThreadPoolExecutor(threads, f"specrouter-{lane}")
            for lane, threads in _THREADS.items()
        }
        self._inside = dict.fromkeys(_THREADS, 0)
        self._lock = threading.Lock()
        self._memory = MemoryReturn()

    async def run(
        self,
        lane: Lane,
        job: Callable[..., Result],
        *arguments: Any,
        max_waiting: int | None = None,
    ) -> Result:
        """The job's result, or what it raises. It runs in the caller's context.

        Args:
            max_waiting: of the lane's jobs; `OverloadedError` where as many wait.
        """
        with self._lock:
            waiting = self._inside[lane] - _THREADS[lane]
            if max_waiting is not None and waiting >= max_waiting:
                raise OverloadedError(waiting, _RETRY_AFTER_S)
            self._inside[lane] += 1
        try:
            done = self._executors[lane].submit(copy_context().run, job, *arguments)
        except RuntimeError as error:
            self._leave(lane)
            raise UnavailableError("the router is closed") from error
        done.add_done_callback(lambda _: self._leave(lane))  # also where it is never begun
        try:
            return await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not done.cancelled() or (task and task.cancelling()):
                raise  # the caller has cancelled it, not `close`
            raise UnavailableError("the router is closed") from None
        finally:
            if lane in _LEAVE_MEMORY:
                self._memory.soon()

    def close(self) -> None:
        """What has begun goes on; what has not is cancelled."""
        for executor in self._executors.values():
            executor.shutdown(wait=False, cancel_futures=True)

    def _leave(self, lane: Lane) -> None:
        with self._lock:
            self._inside[lane] -= 1


def _no_trim() -> None:
    pass


def _glibc_trim() -> Callable[[], object]:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return _no_trim
    return lambda: trim(0)


class MemoryReturn:
    """Memory that nobody uses any more goes back to the system. Thread-safe. Works in a thread of
    its own, which ends by itself.

    glibc keeps what was freed for later, in an arena for each thread: a text of 4 MB that is
    tokenized leaves some hundred megabytes behind, however soon it is forgotten. `malloc_trim`
    gives them back. Where there is no such function (macOS, musl), nothing is done.
    """

    def __init__(self, trim: Callable[[], object] | None = None) -> None:
        self._trim = trim or _glibc_trim()
        self._lock = threading.Lock()
        self._is_planned = False
        self._last_s = -_PAUSE_S

    def soon(self) -> None:
        """After something large is done; as often as one likes."""
        with self._lock:
            if self._is_planned:
                return
            self._is_planned = True
            delay_s = max(_DELAY_S, self._last_s + _PAUSE_S - time.monotonic())
        timer = threading.Timer(delay_s, self._give)
        timer.name, timer.daemon = "specrouter-memory", True
        timer.start()

    def _give(self) -> None:
        with self._lock:  # what is done from here on is for another time
            self._is_planned, self._last_s = False, time.monotonic()
        self._trim()
