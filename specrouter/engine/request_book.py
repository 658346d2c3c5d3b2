"""RequestBook: the engine's requests, those that wait and those that run; how they begin and end.

Contract: every request ends once, whatever fails. Its row is free and it is in the accounts before
its caller is told, who may rely on either. Belongs to the engine's thread.
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

_PREFIXES = 256  # requests of which it is told how much of their prompts was cached
# To look at each of thousands that wait takes milliseconds, so that it is done now and then.
_LONG_QUEUE, _LOOK_S = 256, 0.25


@dataclass(kw_only=True)
class RequestBook:
    """`executor`: has the rows. `running`: by row, in the order of admission. `lengths`: of outputs
    that ended by themselves. `promises`: of admission, and how they ended.
    `order`: that admission follows. `places`: numbers of those that are given rows. `clock`:
    seconds, that requests' times are of. `looked_s`: when it was last looked who of a long queue
    leaves.

    `is_abandoned`: the engine has failed and all have been told, so that a cycle which still ends
    may find its requests ended.
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
        """Takes rows back, notes who is declined, and gives rows: by id."""
        by_id = {one.handle.request_id: one for one in self.running.values()}
        for name, request in (*by_id.items(), *waiting.items()):
            request.rank = admission.ranks.get(name, 0.0)
        for each in admission.preempted:
            self._preempt(by_id[each])
        for each in admission.declined:
            waiting[each].is_declined = True
        for each in admission.lost:
            by_id[each].is_promised = False
            self.promises.note(kept=False, kept_pace=False)
        if admission.order and admission.order != self.order:
            self.order = admission.order
            order = (cycle, len(self.running), self.order, admission.why)
            self.faults.each("accounts", lambda: self.admissions.note_order(*order))
        self.promises.note_held_back(admission.held_back)
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
        """Gives rows without a decision of admission, in this order."""
        rows = self._give_rows(requests)
        self.faults.each("accounts", lambda: self._note(cycle, rows))

    def _note(
        self,
        cycle: int,
        rows: Mapping[int, int],
        declined: Sequence[RunningRequest] = (),
        preempted: Sequence[RunningRequest] = (),
    ) -> None:
        """Who was given a row, who was declined, and who lost the row."""
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
        """Running rows, from whoever keeps its KV memory longest."""
        return sorted(self.running, key=lambda row: self.running[row].order)

    def give_way(self, cycle: int, row: int) -> None:
        """A row's request gives up its KV memory and waits again, before all that are behind it in
        the order."""
        request = self.running[row]
        request.gave_way = True
        self._preempt(request)
        self.faults.each("accounts", lambda: self._note(cycle, {}, preempted=[request]))

    def _in_order(self, admitted: Iterable[RunningRequest]) -> list[RunningRequest]:
        """Nobody is given a row before those that gave way and are before it in the order."""
        gave_way = list(itertools.takewhile(lambda one: one.gave_way, self.waiting))
        ordered = list[RunningRequest]()
        for request in admitted:
            before = [one for one in gave_way if one.order < request.order]
            ordered += [one for one in (*before, request) if one not in ordered]
        return ordered

    def _preempt(self, request: RunningRequest) -> None:
        """It keeps its tokens and its place in the queue; nothing fails between its two places."""
        assert request.row is not None, "only who runs is preempted"
        self.executor.close(request.row, keep=True)
        del self.running[request.row]
        request.row = None
        request.preemptions += 1
        self.waiting.push(request)

    def retire(self) -> None:
        """Ends what was cancelled, and what has run out of time."""
        now_s = self.clock()
        looks = len(self.waiting) <= _LONG_QUEUE or now_s >= self.looked_s + _LOOK_S
        self.looked_s = now_s if looks else self.looked_s
        those = list(self) if looks else list(self.running.values())
        leaving = [(one, *why) for one in those if (why := _why_it_leaves(one)) is not None]
        if leaving:
            self.end_all(leaving)

    def _give_rows(self, requests: Iterable[RunningRequest]) -> dict[int, int]:
        """Gives requests that wait their rows, as far as there are rows and memory: rows by id,
        without those that cannot begin and end alone."""
        rows: dict[int, int] = {}
        for request in requests:
            try:
                spec = request.continuation
                row = self.executor.allocate(spec)
                if row is None:
                    break
                request.row, self.running[row] = row, request  # whatever fails now, it is closed
                self.waiting.remove(request)
                if not request.gave_way:
                    request.place = next(self.places)
                request.gave_way = False
                self.executor.open(row, spec)
                with self.faults.part("prefixes"):
                    self.executor.prepare(row, spec)
                    self._note_inherited(request)
                rows[request.handle.request_id] = row
            except Exception as error:  # no memory for its noise, say: nobody else suffers by it
                logger.exception("request %d cannot begin", request.handle.request_id)
                self.end_all([(request, "error", f"{type(error).__name__}: {error}")])
        return rows

    def follow(self) -> None:
        """Requests take over what others have read meanwhile of prompts that they share."""
        for row in self.executor.prefixes.follow():
            self._note_inherited(self.running[row])

    def _note_inherited(self, request: RunningRequest) -> None:
        if not request.preemptions:  # what it finds again after one is its own
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
        """A request stays in the queue until it has ended: what fails in between loses none."""
        try:
            for request, reason, error in requests:
                self.end(request, reason, error)
        finally:
            self.waiting.take_out(lambda request: request.handle.is_done)

    def conclude(self, request: RunningRequest, delta: Delta) -> None:
        """Hands over the last delta of a request."""
        if request.row is not None:
            self.executor.close(request.row, keep=delta.finish_reason != "error")
        is_first = self._tell(request, delta)
        assert is_first or self.is_abandoned, "a request ends once"
        if request.row is not None:
            del self.running[request.row]
            request.row = None

    def abandon(self, cause: str, others: Iterable[RunningRequest]) -> None:
        """Tells all requests, and `others`, that the engine has failed. Its rows are beyond use; so
        may be what usually tells them."""
        self.is_abandoned = True
        for request in (*self, *others):
            try:
                if not request.handle.is_done:
                    self._tell(request, last_delta(request, "engine_dead", cause))
            except Exception:
                logger.exception("request %d is told otherwise", request.handle.request_id)
                request.handle.give_up(last_delta(request, "engine_dead", cause))

    def _tell(self, request: RunningRequest, delta: Delta) -> bool:
        """Whether it is the first time that its caller is told; the accounts are first."""
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
                self.promises.note(kept=metrics.attained, kept_pace=request.kept_pace(metrics))


def _unattainable(request: RunningRequest) -> str:
    """The error of a request that is rejected."""
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
        return "error", f"its time could not be told: {type(error).__name__}: {error}"
