"""DecodingStep: one decoding cycle, over a row executor.

Ends what leaves, admits, plans, runs the plan, hands over tokens, learns. The engine takes its
steps here, and so does a simulation. Belongs to the engine's thread.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence

from specrouter.cycle import CycleResult, TargetError
from specrouter.engine.admission_queue import WAITING_SHOWN
from specrouter.engine.decode_counts import DecodeCounts
from specrouter.engine.delivery import Delivery
from specrouter.engine.plan_check import PlanCheck
from specrouter.engine.planning import CyclePlanning, Policies, target_alone
from specrouter.engine.quarantine import Quarantine
from specrouter.engine.request_book import RequestBook
from specrouter.engine.view_builder import ViewBuilder
from specrouter.execution.fault_guard import FaultGuard
from specrouter.execution.hang_guard import Abandoned
from specrouter.profile.learning import learn_cycle
from specrouter.profile.profiler import PerformanceProfiler
from specrouter.request.running import RunningRequest
from specrouter.routing.planner import Plan
from specrouter.slo.admission import Admission
from specrouter.view import EngineView, Standing


class DecodingStep:
    """Args:
    names: of all models, weakest first, the target last.
    prefill_chunk: prompt tokens of a cycle, where the policies rest.

    Attributes:
        cycle: the number of the one that runs.
        is_full: for the first that waits.
        counts, quarantine, planning: of the requests, the models and the policies.
    """

    def __init__(
        self,
        book: RequestBook,
        views: ViewBuilder,
        policies: Policies,
        check: PlanCheck,
        profiler: PerformanceProfiler,
        *,
        faults: FaultGuard,
        names: Sequence[str],
        prefill_chunk: int,
        clock: Callable[[], float],
    ) -> None:
        self.cycle = 0
        self.is_full = False
        self.counts = DecodeCounts()
        self.quarantine = Quarantine()
        self.planning = CyclePlanning(policies, self._view, check, faults)
        self._book = book
        self.views = views
        self._executor = book.executor
        self._delivery = Delivery(book, self.quarantine, self.counts, faults)
        self._profiler = profiler
        self._faults = faults
        self._names = names
        self._prefill_chunk = prefill_chunk
        self._clock = clock

    def run(self) -> None:
        started_s = self._clock()
        self._book.retire()
        admitted = self._admit()
        if self._book.running:
            plan = self._plan(admitted)
            result = self._run(plan)
            if result is not None:
                self._delivery.deliver(result, self.cycle, plan.budget_nodes)
                with self._faults.part("learning"):
                    self._learn(plan, result, self._clock() - started_s)

    def _admit(self) -> dict[int, int]:
        """Begins a cycle, and gives requests rows, by id. While no row is free, only who takes some
        back for an objective admits; without a decision of the policies, as many as there is room
        for, in order.
        """
        self.cycle += 1
        book, faults = self._book, self._faults
        with faults.part("prefixes"):
            book.follow()
        has_row = len(book.running) < self._executor.rows
        with faults.part("planning"):
            has_row |= self.planning.policies.preempts and book.has_objectives
        first = list(itertools.islice(book.waiting, WAITING_SHOWN if has_row else 0))
        with faults.part("planning"):  # else as they stand in the queue, its first one first
            first = book.waiting.shown() if has_row else []
        waiting = {request.handle.request_id: request for request in first}
        admission = None
        with faults.part("planning"):
            admission = self.planning.admission(self.cycle, waiting, book.running_ids)
        rows = book.admit(first) if admission is None else self._follow(admission, waiting)
        is_left = bool(book.waiting) and len(book.running) < self._executor.rows
        self.is_full = is_left and (admission is None or admission.waits_for_memory)
        with faults.part("accounts"):
            book.pace.note_queue(bool(book.waiting), self._clock())
        with faults.part("learning"):
            for request in map(book.running.__getitem__, rows.values()):
                if not request.preemptions and request.spec.kv is None:
                    self.counts.record_prompt(len(request.spec.token_ids))
        return rows

    def _follow(
        self, admission: Admission, waiting: Mapping[int, RunningRequest]
    ) -> dict[int, int]:
        """Rows by id of who was given one. Where that fails halfway, who moved has moved."""
        with self._faults.part("planning"):
            return self._book.follow_admission(self.cycle, admission, waiting)
        self.planning.rest_from(self.cycle)
        return {each: one.row for each, one in waiting.items() if one.row is not None}

    def _view(
        self, cycle: int, waiting: Sequence[RunningRequest], standing: Standing
    ) -> EngineView:
        available = self.quarantine.available(self._names, cycle)
        return self.views.build(cycle, self._book.running, waiting, available, standing)

    def _plan(self, admitted: Mapping[int, int]) -> Plan:
        """`admitted`: rows by id. Where the policies fail or rest, the target decodes alone."""
        left, plan = self._executor.unread(self._book.running), None
        with self._faults.part("planning"):
            running = self._book.running
            came = self.views.admitted({row: running[row] for row in admitted.values()})
            waits = self._executor.prefixes.waits(left)
            plan = self.planning.plan(self.cycle, came, left, waits)
        if plan is None:
            return target_alone(self._names[-1], left, self._prefill_chunk)
        return plan

    def _run(self, plan: Plan) -> CycleResult | None:
        """None: the target has failed, and the requests have ended."""
        with self._faults.part("learning"):
            self._profiler.begin_cycle()
        try:
            result = self._executor.run(plan)
        except TargetError as error:
            with self._faults.part("quarantine"):
                self.quarantine.add_all(error.failures, self.cycle)
            for row in plan.rows:
                self._book.end(self._book.running[row], "error", str(error))
            return None
        if self._book.is_abandoned:  # a cycle that was stuck: all have been told
            raise Abandoned
        with self._faults.part("planning"):
            self.planning.judge(self.cycle, result.selection_failed)
        return result

    def _learn(self, plan: Plan, result: CycleResult, elapsed_s: float) -> None:
        self.counts.record_cycle(elapsed_s)
        self._profiler.record_switches(len(plan.records))
        learn_cycle(self._profiler, plan, result, elapsed_s * 1000)
