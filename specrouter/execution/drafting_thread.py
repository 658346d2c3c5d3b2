"""DraftingThread: drafts while the engine's thread verifies.

Contract: jobs run one after the other, each under `torch.inference_mode`. The thread ends when
nobody holds this object any more. One that hangs in a forward is found by who waits for it, and is
left behind: what else it has to do is never done, and it ends when the forward returns.
"""

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TypeVar

import torch

from specrouter.execution.hang_guard import Abandoned, HangGuard

_Result = TypeVar("_Result")
_Work = Callable[[], None]
_Context = AbstractContextManager[None]

_LOOKS = 4  # times that a waiting thread looks at a forward within the time that it may take


class DraftingThread:
    """Args: `guard`: of the forwards of its jobs, which nobody else gives up then."""

    def __init__(self, guard: HangGuard | None = None) -> None:
        self._guard = guard
        self._minder = object()
        self._jobs: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        minded = nullcontext() if guard is None else guard.minded(self._minder)
        work = partial(_work, self._jobs, minded, torch.get_num_threads())
        threading.Thread(target=work, name="specrouter-drafting", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, function: Callable[[], _Result]) -> "Future[_Result]":
        """To be run after those that were submitted before."""
        future: Future[_Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function()
            except Abandoned:
                raise
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._jobs.put(run)
        return future

    def hung(self, future: "Future[_Result]") -> str | None:
        """Waits until a job is done, or a forward of the thread hangs: of which model."""
        guard = self._guard
        patience_s = None if guard is None else guard.limit_s / _LOOKS
        while wait([future], patience_s).not_done:
            model = None if guard is None else guard.give_up(self._minder)
            if model is not None:
                return model
        return None


def _work(jobs: "queue.SimpleQueue[_Work | None]", minded: _Context, threads: int) -> None:
    """`threads`: of torch, which gives a new thread what any other has set last."""
    torch.set_num_threads(threads)
    with suppress(Abandoned), minded, torch.inference_mode():
        while True:
            run = jobs.get()
            if run is None:
                return
            run()
            del run  # it holds whoever holds this thread
