"""RequestBook: the engine's requests, those that wait and those that run, and how they end.

Contract: every request ends once, whatever fails. Its row is free and it is in the accounts before
its caller is told, who may rely on either. Belongs to the engine's thread.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from specrouter.engine.admission_queue import AdmissionPace, AdmissionQueue
from specrouter.engine.request_meter import RequestMeter
from specrouter.request.output import Delta, FinishReason
from specrouter.request.running import RunningRequest
from specrouter.slo.accounts import SloAccounts

logger = logging.getLogger(__name__)


@dataclass
class RequestBook:
    """`close_row`: frees a row. `running`: by row, in the order of admission.

    `is_abandoned`: the engine has failed and all that ran have been told, so that a cycle which
    still ends may find its requests ended.
    """

    close_row: Callable[[int], None]
    slo_accounts: SloAccounts
    meter: RequestMeter
    waiting: AdmissionQueue = field(default_factory=AdmissionQueue)
    running: dict[int, RunningRequest] = field(default_factory=dict)
    pace: AdmissionPace = field(default_factory=AdmissionPace)
    is_abandoned: bool = False

    def __iter__(self) -> Iterator[RunningRequest]:
        yield from self.waiting
        yield from self.running.values()

    def retire(self) -> None:
        """Ends what was cancelled, and what has run out of time."""
        leaving = [one for one in self if one.handle.is_cancelled or one.is_late]
        if leaving:
            self.end_all(
                [(one, "cancelled" if one.handle.is_cancelled else "timeout") for one in leaving]
            )

    def end(self, request: RunningRequest, reason: FinishReason, error: str | None = None) -> None:
        if reason == "error":
            handle = request.handle
            logger.warning(
                "request %d failed: %s", handle.request_id, error, extra=handle.log_extra
            )
        self.conclude(request, request.finish(reason, error))

    def end_all(self, requests: Sequence[tuple[RunningRequest, FinishReason]]) -> None:
        """A request stays in the queue until it has ended: what fails in between loses none."""
        try:
            for request, reason in requests:
                self.end(request, reason)
        finally:
            self.waiting.take_out(lambda request: request.handle.is_done)

    def conclude(self, request: RunningRequest, delta: Delta) -> None:
        """Hands over the last delta of a request."""
        if request.row is not None:
            self.close_row(request.row)
        self._account(request, delta)
        is_first = request.handle.deliver(delta)
        assert is_first or self.is_abandoned, "a request ends once"
        if request.row is not None:
            del self.running[request.row]
            request.row = None

    def tell(self, requests: Iterable[RunningRequest], reason: FinishReason, cause: str) -> None:
        """Ends requests after a failure of the engine, whose rows are beyond use."""
        for request in list(requests):
            if not request.handle.is_done:
                delta = request.finish(reason, cause)
                try:
                    self._account(request, delta)
                except Exception:  # after a failure anything may be broken; all are told
                    logger.exception("a request is missing in the accounts")
                request.handle.deliver(delta)

    def _account(self, request: RunningRequest, delta: Delta) -> None:
        assert delta.output is not None, "only the last delta ends a request"
        metrics, tokens = delta.output.metrics, request.produced_tokens
        ended_s = time.perf_counter()
        if request.row is not None:
            self.pace.note_end(ended_s)
        self.slo_accounts.record(metrics, tokens, request.submitted_s, ended_s)
        self.meter.record(delta.output, ended_s - request.submitted_s)
