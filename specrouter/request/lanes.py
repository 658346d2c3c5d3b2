"""Lanes: the threads that do what takes long for requests that are not queued yet.

Contract: what is large has a lane of its own, one thread wide, so that it neither holds up what is
small nor has its memory taken several times at once. When something large is done, memory that
nobody uses goes back to the system. Jobs of a lane begin in the order in which they came.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

from specrouter.request.errors import OverloadedError, UnavailableError
from specrouter.request.memory import MemoryReturn

Result = TypeVar("Result")

# "texts": to tokenize a prompt, or to write an answer of many parts. "long_texts": of more than
# `LONG_CHARACTERS`. "structures": to compile a grammar. "bodies": to parse a large body.
# "tokenize": for clients that want the tokens only.
Lane = Literal["texts", "long_texts", "structures", "bodies", "tokenize"]

LONG_CHARACTERS = 2**18
MAX_WAITING_TOKENIZE = 64  # requests
_THREADS: dict[Lane, int] = {
    "texts": 8,
    "long_texts": 1,
    "structures": 2,
    "bodies": 1,
    "tokenize": 1,
}
_RETRY_AFTER_S = 1.0


def text_lane(characters: int) -> Lane:
    """For a text, or several of one request together."""
    return "long_texts" if characters > LONG_CHARACTERS else "texts"


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
        is_large: bool = False,
        max_waiting: int | None = None,
    ) -> Result:
        """The job's result, or what it raises.

        Args:
            is_large: it leaves much memory behind.
            max_waiting: of the lane's jobs; `OverloadedError` where as many wait.
        """
        with self._lock:
            waiting = self._inside[lane] - _THREADS[lane]
            if max_waiting is not None and waiting >= max_waiting:
                raise OverloadedError(waiting, _RETRY_AFTER_S)
            self._inside[lane] += 1
        try:
            done = self._executors[lane].submit(job, *arguments)
        except RuntimeError as error:
            self._leave(lane)
            raise UnavailableError("the router is closed") from error
        done.add_done_callback(lambda _: self._leave(lane))  # also where it is never begun
        try:
            return await asyncio.wrap_future(done)
        finally:
            if is_large:
                self._memory.soon()

    def close(self) -> None:
        """What has begun goes on; what has not is cancelled."""
        for executor in self._executors.values():
            executor.shutdown(wait=False, cancel_futures=True)

    def _leave(self, lane: Lane) -> None:
        with self._lock:
            self._inside[lane] -= 1
