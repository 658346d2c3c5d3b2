"""Lanes: threads for slow work on requests that are not queued yet.

Contract: large jobs have a lane of their own with a single thread, so that they do not delay small
ones and do not multiply their memory. After a large job, unused memory is returned to the system.
Jobs of a lane begin in the order in which they came.
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

# "requests": read a request, tokenize and check it. "large": the same beyond `LONG_CHARACTERS`.
# "structures": compile its grammar. "tokenize": for clients that want the tokens only.
Lane = Literal["requests", "large", "structures", "tokenize"]

LONG_CHARACTERS = 2**18  # characters of a prompt, or bytes of a body
MAX_WAITING_TOKENIZE = 64  # requests
_THREADS: dict[Lane, int] = {
    "requests": 8,
    "large": 1,
    "structures": 2,
    "tokenize": 1,
}
_LEAVE_MEMORY: Collection[Lane] = ("large", "tokenize")  # lanes whose jobs leave much memory unused
_RETRY_AFTER_S = 1.0
_DELAY_S = 1.0  # until memory is returned, to include other large jobs
_PAUSE_S = 5.0  # between two returns of memory, since threads that allocate wait for them


def lane_of(length: int) -> Lane:
    """Return the lane of a request of so many characters, or bytes, in all."""
    return "large" if length > LONG_CHARACTERS else "requests"


class Lanes:
    """The lanes of a router; close them. Threads begin with a lane's first job."""

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
        """Return the job's result, or raise its error. It runs in the caller's context.

        `OverloadedError` is raised if `max_waiting` jobs of the lane wait already.
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
        done.add_done_callback(lambda _: self._leave(lane))  # even if it never begins
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
        """Cancel the jobs that have not begun; the others go on."""
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
    """A thread that returns unused memory to the system, and ends by itself. Thread-safe.

    glibc keeps freed memory for later, in an arena for each thread: tokenizing a text of 4 MB
    leaves some hundred megabytes behind, even if all of it is freed. `malloc_trim` returns them. On
    systems without it (macOS, musl), nothing is done.
    """

    def __init__(self, trim: Callable[[], object] | None = None) -> None:
        self._trim = trim or _glibc_trim()
        self._lock = threading.Lock()
        self._is_planned = False
        self._last_s = -_PAUSE_S

    def soon(self) -> None:
        """Plan a return of memory after a large job; it may be called at any rate."""
        with self._lock:
            if self._is_planned:
                return
            self._is_planned = True
            delay_s = max(_DELAY_S, self._last_s + _PAUSE_S - time.monotonic())
        timer = threading.Timer(delay_s, self._give)
        timer.name, timer.daemon = "specrouter-memory", True
        timer.start()

    def _give(self) -> None:
        with self._lock:  # later jobs plan the next return
            self._is_planned, self._last_s = False, time.monotonic()
        self._trim()
