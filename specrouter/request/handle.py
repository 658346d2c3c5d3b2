"""RequestHandle: the caller's side of a running request. May be used from any thread."""

import logging
import queue
import threading
from collections.abc import Callable, Iterator

from specrouter.logs import REQUEST_ID
from specrouter.request.errors import EngineDeadError
from specrouter.request.output import Delta, RequestOutput

logger = logging.getLogger(__name__)

Listener = Callable[[Delta], None]


class RequestHandle:
    """The handle of a request: iterate for deltas, or wait for the `result`.

    Do one of both, from one thread at a time. Both raise `EngineDeadError` if the engine fails
    before the request ends.
    """

    def __init__(
        self, request_id: int, wake_engine: Callable[[], None], listener: Listener | None = None
    ) -> None:
        self.request_id = request_id
        self.log_extra = {"request_id": REQUEST_ID.get()}  # of the HTTP request, if it is one
        self._wake_engine = wake_engine
        self._listener = listener
        self._deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        self._done = threading.Event()
        self._delivering = threading.Lock()
        self._cancelled = threading.Event()
        self._output: RequestOutput | None = None

    def __iter__(self) -> Iterator[Delta]:
        while True:
            delta = self._deltas.get()
            EngineDeadError.check(delta.output)
            yield delta
            if delta.finish_reason is not None:
                return

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end. Raises `TimeoutError` after `timeout` seconds."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"request {self.request_id} has not ended within {timeout} s")
        assert self._output is not None
        EngineDeadError.check(self._output)
        return self._output

    def cancel(self) -> None:
        """End the request within one cycle; nothing happens if it has ended."""
        self._cancelled.set()
        self._wake_engine()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def deliver(self, delta: Delta) -> bool:
        """Deliver a delta for the engine; errors of a caller's listener do not reach it.

        Returns whether it counts: a request ends once, even if two threads end it because one of
        them seemed to be stuck.
        """
        with self._delivering:
            if self.is_done:
                return False
            self._hand_over(delta)
            return True

    def give_up(self, delta: Delta) -> None:
        """End the request with its last delta if `deliver` fails. Never raises."""
        with self._delivering:
            if self._done.is_set():
                return
            self._output = delta.output
            self._done.set()
            try:
                (self._listener or self._deltas.put)(delta)
            except Exception:
                logger.exception("request %d: its listener got no delta", self.request_id)

    def _hand_over(self, delta: Delta) -> None:
        if self._listener is None:
            self._deltas.put(delta)
        else:
            try:
                self._listener(delta)
            except Exception as error:
                # A caller that leaves early cancels first; its event loop may be closed by now.
                logger.log(
                    logging.DEBUG if self.is_cancelled else logging.WARNING,
                    "request %d: it has no listener any more: %s",
                    self.request_id,
                    error,
                    extra=self.log_extra,
                )
                self._cancelled.set()
        if delta.output is not None:
            self._output = delta.output
            self._done.set()
