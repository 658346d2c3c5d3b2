"""The engine's waiting and running requests, from the queue to their last delta.

Contract: every request ends exactly once, even after failures. Its row is free and it is counted
before its caller gets the last delta. Belongs to the engine's thread.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from specrouter.engine.admission_log import AdmissionLog
from specrouter.engine.admission_queue import AdmissionPace, AdmissionQueue
from specrouter.engine.decode_counts import DecodeCounts
from specrouter.engine.prefix_record import PrefixRecord
from specrouter.engine.request_meter import RequestMeter
from specrouter.engine.row_executor import RowExecutor
from specrouter.engine.slo_accounts import SloAccounts
from specrouter.execution.fault_guard import FaultGuard
from specrouter.profile.output_lengths import OutputLengths
from specrouter.request.output import (
    UNATTAINABLE,
    Delta,
    Feasible,
    FinishReason,
    RequestMetrics,
)
from specrouter.request.running import RunningRequest, last_delta
from specrouter.slo.admission import Admission, Order
from specrouter.slo.serve.promises import Promises

logger = logging.getLogger(__name__)

_PREFIXES = 256  # prefix records that are kept
# Checking thousands of waiting requests takes milliseconds: a longer queue is checked less often.
_LONG_QUEUE, _LOOK_S = 256, 0.25


@dataclass(kw_only=True)
class RequestBook:
    """The requests of an engine, and the accounts of them.

    Attributes:
        executor: owns the rows.
        lengths: output lengths of requests that were not cancelled and did not fail.
        running: running requests by row, in the order of admission.
        promises: objectives that admission has promised, and whether they were attained.
        order: the order that admission follows.
        places: consecutive numbers for requests that are given rows.
        is_abandoned: the engine has failed and all requests have ended; a cycle that returns
            later may find its requests ended.
        looked_s: time of the last search of a long queue for requests that leave.
        clock: returns seconds; all times of requests are its times.
    """

    executor: RowExecutor
    meter: RequestMeter
    faults: FaultGuard
    slo_accounts: SloAccounts = field(default_factory=SloAccounts)
    lengths: OutputLengths = field(default_factory=OutputLengths)
    admissions: AdmissionLog = field(default_factory=AdmissionLog)
    counts: DecodeCounts = field(default_factory=DecodeCounts)
    prefixes: deque[PrefixRecord] = field(default_factory=lambda: deque(maxlen=_PREFIXES))
    waiting: AdmissionQueue = field(default_factory=AdmissionQueue)
    running: dict[int, RunningRequest] = field(default_factory=dict)
    pace: AdmissionPace = field(default_factory=AdmissionPace)
    promises: Promises = field(default_factory=Promises)
    order: Order = "first_come"
    places: Iterator[int] = field(default_factory=itertools.count)
    is_abandoned: bool = False
    looked_s: float = 0.0
    clock: Callable[[], float] = time.perf_counter

    def __iter__(self) -> Iterator[RunningRequest]:
        yield from self.waiting
        yield from self.running.values()

    @property
    def running_ids(self) -> set[int]:
        return {one.handle.request_id for one in self.running.values()}

    @property
    def has_objectives(self) -> bool:
        running = self.running.values()
        return self.waiting.has_objectives or any(one.objective is not None for one in running)

    def follow_admission(
        self, cycle: int, admission: Admission, waiting: Mapping[int, RunningRequest]
    ) -> dict[int, int]:
        """Carry out a decision of admission: preempt, decline, and give rows.

        Returns the new rows by request id.
        """
        by_id = {one.handle.request_id: one for one in self.running.values()}
        for name, request in (*by_id.items(), *waiting.items()):
            request.rank = admission.ranks.get(name, 0.0)
        for each in admission.preempted:
            self._preempt(by_id[each])
        for each in admission.declined:
            waiting[each].is_declined = True
        for each in admission.lost:
            by_id[each].is_promised = False
            self.promises.note(kept=False)
        if admission.order and admission.order != self.order:
            self.order = admission.order
            order = (cycle, len(self.running), self.order, admission.why)
            self.faults.each("accounts", lambda: self.admissions.note_order(*order))
        rejected = [waiting[each] for each in admission.declined if waiting[each].rejects]
        if rejected:
            self.end_all([(one, "error", _unattainable(one)) for one in rejected])
        admitted = [waiting[one] for one in admission.admitted if not waiting[one].finished]
        rows = self._give_rows(self._in_order(admitted))
        for each in admission.promised & rows.keys():
            waiting[each].is_promised = True
        declined = [waiting[one] for one in admission.declined]
        preempted = [by_id[one] for one in admission.preempted]
        self.faults.each("accounts", lambda: self._note(cycle, rows, declined, preempted))
        return rows

    def admit(self, cycle: int, requests: Iterable[RunningRequest]) -> None:
        """Give rows in the given order, without a decision of admission."""
        rows = self._give_rows(requests)
        self.faults.each("accounts", lambda: self._note(cycle, rows))

    def _note(
        self,
        cycle: int,
        rows: Mapping[int, int],
        declined: Sequence[RunningRequest] = (),
        preempted: Sequence[RunningRequest] = (),
    ) -> None:
        """Record the requests that were given a row, were declined, or lost their row."""
        came = [self.running[row] for row in rows.values()]
        self.faults.each(
            "accounts",
            lambda: self.slo_accounts.note_admission(came, declined, preempted),
            lambda: self.admissions.note(cycle, len(self.running), came, declined, preempted),
            lambda: self._count_prompts(came),
        )

    def _count_prompts(self, came: Sequence[RunningRequest]) -> None:
        for request in came:
            if not request.preemptions and request.spec.kv is None:
                self.counts.record_prompt(len(request.spec.token_ids))

    def by_order(self) -> list[int]:
        """Return the running rows in their order; the last one gives up its KV memory first."""
        return sorted(self.running, key=lambda row: self.running[row].order)

    def give_way(self, cycle: int, row: int) -> None:
        """Preempt a row's request to free KV memory; it waits again, at its place in the order."""
        request = self.running[row]
        request.gave_way = True
        self._preempt(request)
        self.faults.each("accounts", lambda: self._note(cycle, {}, preempted=[request]))

    def _in_order(self, admitted: Iterable[RunningRequest]) -> list[RunningRequest]:
        """Return the admitted requests, each after those that gave up memory and precede it."""
        gave_way = list(itertools.takewhile(lambda one: one.gave_way, self.waiting))
        ordered = list[RunningRequest]()
        for request in admitted:
            before = [one for one in gave_way if one.order < request.order]
            ordered += [one for one in (*before, request) if one not in ordered]
        return ordered

    def _preempt(self, request: RunningRequest) -> None:
        """Move a running request back to the queue, with its tokens and its admission key."""
        assert request.row is not None, "only who runs is preempted"
        self.executor.close(request.row, keep=True)
        del self.running[request.row]
        request.row = None
        request.preemptions += 1
        self.waiting.push(request)

    def retire(self) -> None:
        """End requests that were cancelled or are past their timeout."""
        now_s = self.clock()
        looks = len(self.waiting) <= _LONG_QUEUE or now_s >= self.looked_s + _LOOK_S
        self.looked_s = now_s if looks else self.looked_s
        those = list(self) if looks else list(self.running.values())
        leaving = [(one, *why) for one in those if (why := _why_it_leaves(one)) is not None]
        if leaving:
            self.end_all(leaving)

    def _give_rows(self, requests: Iterable[RunningRequest]) -> dict[int, int]:
        """Give waiting requests rows, while there are rows and memory; return the rows by id.

        A request that fails to begin ends with an error, and no other is affected.
        """
        rows: dict[int, int] = {}
        for request in requests:
            try:
                spec = request.continuation
                row = self.executor.allocate(spec)
                if row is None:
                    break
                request.row, self.running[row] = row, request  # closed even after a failure below
                self.waiting.remove(request)
                if not request.gave_way:
                    request.place = next(self.places)
                request.gave_way = False
                self.executor.open(row, spec)
                with self.faults.part("prefixes"):
                    self.executor.prepare(row, spec)
                    self._note_inherited(request)
                rows[request.handle.request_id] = row
            except Exception as error:  # no memory for its noise, for example
                logger.exception("request %d cannot begin", request.handle.request_id)
                self.end_all([(request, "error", f"{type(error).__name__}: {error}")])
        return rows

    def follow(self) -> None:
        """Let rows take over what other rows have read of a shared prompt."""
        for row in self.executor.prefixes.follow():
            self._note_inherited(self.running[row])

    def _note_inherited(self, request: RunningRequest) -> None:
        if not request.preemptions:  # after a preemption, cached tokens may be its own
            assert request.row is not None
            request.cached_tokens = self.executor.prefixes.inherited(request.row)

    def end(self, request: RunningRequest, reason: FinishReason, error: str | None = None) -> None:
        if reason == "error":
            handle = request.handle
            level = logging.DEBUG if request.is_declined and request.rejects else logging.WARNING
            logger.log(
                level, "request %d failed: %s", handle.request_id, error, extra=handle.log_extra
            )
        self.conclude(request, last_delta(request, reason, error))

    def end_all(self, requests: Sequence[tuple[RunningRequest, FinishReason, str | None]]) -> None:
        """End requests; waiting ones leave the queue only then, so that no failure loses one."""
        try:
            for request, reason, error in requests:
                self.end(request, reason, error)
        finally:
            self.waiting.take_out(lambda request: request.handle.is_done)

    def conclude(self, request: RunningRequest, delta: Delta) -> None:
        """Free the row of a request, and deliver its last delta."""
        if request.row is not None:
            self.executor.close(request.row, keep=delta.finish_reason != "error")
        is_first = self._deliver(request, delta)
        assert is_first or self.is_abandoned, "a request ends once"
        if request.row is not None:
            del self.running[request.row]
            request.row = None

    def abandon(self, cause: str, others: Iterable[RunningRequest]) -> None:
        """End all requests, and `others`, because the engine has failed.

        Rows are not freed. A request whose usual delivery fails gets its last delta directly.
        """
        self.is_abandoned = True
        for request in (*self, *others):
            try:
                if not request.handle.is_done:
                    self._deliver(request, last_delta(request, "engine_dead", cause))
            except Exception:
                logger.exception("request %d ends without its delta", request.handle.request_id)
                request.handle.give_up(last_delta(request, "engine_dead", cause))

    def _deliver(self, request: RunningRequest, delta: Delta) -> bool:
        """Count a request's end and deliver its last delta; return False if it had one before."""
        ended_s, output = self.clock(), delta.output
        assert output is not None, "only the last delta ends a request"
        submitted_s, metrics = request.submitted_s, output.metrics
        self.faults.each(
            "accounts",
            lambda: None if request.row is None else self.pace.note_end(ended_s),
            lambda: self.slo_accounts.record(
                metrics,
                request.produced_tokens,
                submitted_s,
                ended_s,
                stages_before=request.pace.stages_before,
            ),
            lambda: self._note_prefix(request),
            lambda: self.meter.record(output, ended_s - submitted_s),
            lambda: self._note_length(request, delta, metrics),
        )
        return request.handle.deliver(delta)

    def _note_prefix(self, request: RunningRequest) -> None:
        if request.produced_tokens:
            self.prefixes.append(PrefixRecord.of(request))

    def _note_length(self, request: RunningRequest, delta: Delta, metrics: RequestMetrics) -> None:
        if delta.finish_reason in ("eos", "stop", "length") and not delta.goes_on:
            slo_class = None if request.objective is None else request.objective.slo_class
            self.lengths.record(slo_class, metrics.output_tokens)
            if request.is_promised and metrics.attained is not None:
                self.promises.note(kept=metrics.attained)


def _unattainable(request: RunningRequest) -> str:
    feasible = request.feasible or Feasible()
    given = [
        f"{name} {value_ms:.4g}"
        for name, value_ms in (("ttft_ms", feasible.ttft_ms), ("tpot_ms", feasible.tpot_ms))
        if value_ms is not None
    ]
    return f"{UNATTAINABLE} now" + (f"; {' and '.join(given)} could be" if given else "")


def _why_it_leaves(request: RunningRequest) -> tuple[FinishReason, str | None] | None:
    try:
        if request.handle.is_cancelled:
            return "cancelled", None
        return ("timeout", None) if request.is_late else None
    except Exception as error:
        return "error", f"its time could not be read: {type(error).__name__}: {error}"
