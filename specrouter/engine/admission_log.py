"""A log of admission's last 256 decisions about objectives, each with its reason.

Contract: the engine's thread writes it, any thread may read it. Requests that are given rows in
their order, as `fcfs` does, are not recorded.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from specrouter.engine.slo_accounts import class_named
from specrouter.request.objective import Objective
from specrouter.request.output import Feasible
from specrouter.request.running import RunningRequest
from specrouter.slo.admission import Order

_RECORDS = 256

Outcome = Literal["admitted", "best_effort", "resumed", "declined", "rejected", "preempted"] | Order


@dataclass(frozen=True, kw_only=True)
class AdmissionRecord:
    """A decision of admission about a request, or about the order that it follows from then on.

    A record of a change of order belongs to no request.

    Attributes:
        unix_s: time of the decision, in seconds since 1970.
        request: the request's number, as in the log; `request_id`: that of its HTTP request.
        waited_ms: time since the request's submission.
        running: requests that had a row after the cycle's decisions.
        feasible: for a rejected request, what it could have attained, if that was found.
    """

    cycle: int
    unix_s: float
    request: int | None = None
    request_id: str | None = None
    slo_class: str | None = None
    objective: Objective | None = None
    outcome: Outcome
    reason: str
    waited_ms: float = 0.0
    running: int
    feasible: Feasible | None = None

    def to_json(self) -> dict[str, Any]:
        rounded = {"unix_s": round(self.unix_s, 3), "waited_ms": round(self.waited_ms, 3)}
        return asdict(self) | rounded


class AdmissionLog:
    def __init__(self) -> None:
        self._records: deque[AdmissionRecord] = deque(maxlen=_RECORDS)

    @property
    def records(self) -> list[AdmissionRecord]:
        """The kept records, oldest first."""
        return list(self._records)

    def note(
        self,
        cycle: int,
        running: int,
        came: Sequence[RunningRequest],
        declined: Sequence[RunningRequest],
        preempted: Sequence[RunningRequest],
    ) -> None:
        """Record a cycle's decisions.

        Args:
            cycle: its number.
            running: requests that have a row after it.
            came: requests that were given a row.
            declined: requests whose objectives admission does not promise.
            preempted: requests that lost their row.
        """
        for request in preempted:
            names = ", ".join(str(one.handle.request_id) for one in came)
            why = f"its row or its KV memory is needed for requests {names}"
            if request.gave_way:
                why = "its KV memory is needed for requests before it in the order"
            self._keep(cycle, running, request, "preempted", why)
        for request in declined:
            is_over = request.finished
            why = "its objective cannot be attained beside those of admitted requests, if at all"
            self._keep(cycle, running, request, "rejected" if is_over else "declined", why)
        for request in came:
            if request.is_promised:
                self._keep(cycle, running, request, "admitted", "its objective can be attained")
            elif request.preemptions:
                why = "a row is left again after it was preempted"
                self._keep(cycle, running, request, "resumed", why)
            elif request.is_declined:
                why = "a row is left, and it was declined before"
                self._keep(cycle, running, request, "best_effort", why)

    def note_order(self, cycle: int, running: int, order: Order, why: str) -> None:
        """Record that admission follows another order from this cycle on."""
        self._records.append(
            AdmissionRecord(
                cycle=cycle, unix_s=time.time(), outcome=order, reason=why, running=running
            )
        )

    def _keep(
        self, cycle: int, running: int, request: RunningRequest, outcome: Outcome, reason: str
    ) -> None:
        handle = request.handle
        record = AdmissionRecord(
            cycle=cycle,
            unix_s=time.time(),
            request=handle.request_id,
            request_id=handle.log_extra["request_id"],
            slo_class=class_named(request.objective),
            objective=request.objective,
            outcome=outcome,
            reason=reason,
            waited_ms=(time.perf_counter() - request.submitted_s) * 1000,
            running=running,
            feasible=request.feasible if outcome == "rejected" else None,
        )
        self._records.append(record)
