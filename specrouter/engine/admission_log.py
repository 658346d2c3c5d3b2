"""AdmissionLog: what admission lately decided about requests' objectives, and why.

Contract: told by the engine's thread, read by any; keeps the last 256. Requests that are given rows
as `fcfs` gives them, in their order, are not told of.
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
    """A decision about a request, or about the order that admission follows from now on, which is
    of none.

    Attributes:
        unix_s: when it was, in seconds since 1970.
        request: its number, as in the log; `request_id`: of its HTTP request.
        waited_ms: since its submission.
        running: requests with a row once the cycle had decided.
        feasible: of a rejected one: what could have been attained, where that was found.
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
        """Oldest first."""
        return list(self._records)

    def note(
        self,
        cycle: int,
        running: int,
        came: Sequence[RunningRequest],
        declined: Sequence[RunningRequest],
        preempted: Sequence[RunningRequest],
    ) -> None:
        """Of a cycle, after which so many have a row: who was given one, who was declined, and who
        lost the row."""
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
        """Another one is followed from this cycle on."""
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
