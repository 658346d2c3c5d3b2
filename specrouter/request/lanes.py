"""Lanes: the threads that do what takes long for requests that are not queued yet.

Contract: what is large has a lane of its own, one thread wide, so that it neither holds up what is
small nor has its memory taken several times at once. When something large is done, memory that
nobody uses goes back to the system. Jobs of a lane begin in the order in which they came.
"""

import asyncio
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, Literal, TypeVar

from specrouter.request.errors import OverloadedError, UnavailableError
from specrouter.request.memory import MemoryReturn

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
