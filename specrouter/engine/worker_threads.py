"""WorkerThreads: the threads of an engine, by role."""

import threading
from collections.abc import Callable

import torch


class WorkerThreads:
    """Args: none; torch has as many threads in each of them as where this is made.

    Torch gives a new thread what any thread has set last: a hanging forward, say, its model's.
    """

    def __init__(self) -> None:
        self._cpu_threads = torch.get_num_threads()
        self._threads: dict[str, threading.Thread] = {}

    def start(self, role: str, target: Callable[..., None], *arguments: object) -> None:
        """One of this role that hangs is left behind."""

        def run() -> None:
            torch.set_num_threads(self._cpu_threads)
            target(*arguments)

        thread = threading.Thread(target=run, name=f"specrouter-{role}", daemon=True)
        self._threads[role] = thread
        thread.start()

    def __contains__(self, thread: threading.Thread) -> bool:
        return thread in self._threads.values()

    def join(self, but: str | None) -> None:
        """To their very end: one that the interpreter's end meets in torch would abort the
        process. `but`: a role that is not waited for."""
        for role, thread in self._threads.items():
            if role != but:
                thread.join()
