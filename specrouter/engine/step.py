"""One decoding cycle, with a row executor that runs its plan.

It ends requests that leave, admits, plans, runs the plan, delivers tokens, and learns. The engine
and simulations use it. Belongs to the engine's thread.
"""

import itertools
import logging
from collections.abc import Sequence

from specrouter.cycle import Commit, CycleResult, TargetError
from specrouter.engine.admission_queue import WAITING_SHOWN
from specrouter.engine.cycle_log import CycleLog
from specrouter.engine.decode_counts import Gain
from specrouter.engine.plan_check import PlanCheck
from specrouter.engine.planning import CyclePlanning, Policies, target_alone, without_row
from specrouter.engine.quarantine import Quarantine
from specrouter.engine.request_book import RequestBook
from specrouter.engine.view_builder import ViewBuilder
from specrouter.profile.learning import learn_cycle
from specrouter.profile.profiler import PerformanceProfiler
from specrouter.request.output import Delta
from specrouter.request.running import RunningRequest, last_delta
from specrouter.routing.planner import Plan
from specrouter.view import EngineView, Standing

logger = logging.getLogger(__name__)

# Consecutive failures of the target after which the engine ends, as requests are not the cause.
MOST_TARGET_FAILURES = 8


class DecodingStep:
    """The decoding cycles of an engine or a simulation.

    Args:
        names: all models, weakest first, the target last.
        prefill_chunk: most prompt tokens of a cycle while the policies rest.

    Attributes:
        cycle: number of the cycle that runs, or of the last one.
        is_full: a row is free, but the first waiting request lacks memory.
        counts, quarantine, planning: totals of decoding, models that rest, calls of the policies.
        cycles: log of the last cycles.
    """

    def __init__(
        self,
        book: RequestBook,
        views: ViewBuilder,
        policies: Policies,
        check: PlanCheck,
        profiler: PerformanceProfiler,
        *,
        names: Sequence[str],
        prefill_chunk: int,
    ) -> None:
        self.cycle = 0
        self.is_full = False
        self.counts = book.counts
        self.cycles = CycleLog(names[-1])
        self.quarantine = Quarantine()
        self.planning = CyclePlanning(policies, self._view, check, book.faults)
        self._book = book
        self.views = views
        self._executor = book.executor
        self._profiler = profiler
        self._faults = book.faults
        self._names = names
        self._prefill_chunk = prefill_chunk
        self._target_failures = 0  # in consecutive cycles
        self._clock = book.clock

    def run(self) -> None:
        started_s, book = self._clock(), self._book
        self.cycle += 1
        book.retire()
        self._faults.each("planning", self._begin)
        planned = self._again()
        if planned is None:
            with self._faults.part("planning"), self.planning.resting_after_failure(self.cycle):
                planned = self._decide()
        whole = planned or self._first_come()
        plan = self._with_memory(whole)
        self._faults.each(
            "accounts", lambda: book.pace.note_queue(bool(book.waiting), self._clock())
        )
        if plan.rows:
            drafters = {name for group in plan.groups for name in group.chain[:-1]}
            is_loaded = all(map(self._executor.is_open, drafters))
            result = self._run(plan)
            result.is_regular &= plan is whole  # predictions are for the whole plan
            produced = self._deliver(result, plan.budget_nodes)
            elapsed_s = self._clock() - started_s
            self._faults.each(
                "accounts",
                lambda: self.planning.keep(self.cycle, plan),
                lambda: self.planning.judge(self.cycle, result.selection_failed),
                lambda: self.quarantine.learn(result, self.cycle),
                lambda: self._learn(plan, result, elapsed_s),
                lambda: self._measure(is_loaded and plan is planned, result, produced, elapsed_s),
                self._profiler.begin_cycle,
            )
            if not result.is_regular or result.failures or result.errors:
                self.planning.forget()

    def _again(self) -> Plan | None:
        """Return the last plan if it can be used again: no request waits or has an objective."""
        book = self._book
        if book.waiting or book.has_objectives:
            self.planning.forget()
            return None
        self.is_full = False
        return self.planning.again(self.cycle, book.running)

    def _decide(self) -> Plan:
        """Let the policies admit and plan; while they rest, use `_first_come`.

        If it fails halfway, rows that were given or taken back stay so.
        """
        book, planning, cycle = self._book, self.planning, self.cycle
        book.follow()
        has_row = len(book.running) < self._executor.rows
        has_row |= planning.policies.preempts and book.has_objectives
        first = book.waiting.shown() if has_row else []
        waiting = {request.handle.request_id: request for request in first}
        admission = planning.admission(cycle, waiting, book.running_ids)
        if admission is None:
            return self._first_come(first)
        rows = book.follow_admission(cycle, admission, waiting)
        self._note_room(admission.waits_for_memory)
        left = self._executor.unread(book.running)
        if not left:
            return self._alone()
        came = self.views.admitted({row: book.running[row] for row in rows.values()})
        return planning.plan(cycle, came, left, self._executor.prefixes.waits(left))

    def _first_come(self, first: Sequence[RunningRequest] | None = None) -> Plan:
        """Give rows in order, while there is room, and plan for the target alone.

        `first`: the waiting requests to consider; None: the first ones of the queue.
        """
        book = self._book
        if first is None:
            first = list(itertools.islice(book.waiting, WAITING_SHOWN))
        if len(book.running) < self._executor.rows:
            book.admit(self.cycle, first)
        self._note_room(True)
        return self._alone()

    def _note_room(self, waits_for_memory: bool) -> None:
        is_left = bool(self._book.waiting) and len(self._book.running) < self._executor.rows
        self.is_full = is_left and waits_for_memory

    def _with_memory(self, plan: Plan) -> Plan:
        """Return the plan, of rows that have KV memory for what they write without drafts.

        While memory is short, the last request in the order is preempted, planned or not; the first
        is never preempted, because its text alone fits.
        """
        order = self._book.by_order()
        while plan.rows and self._lacks_memory(plan, order) and len(order) > 1:
            self._book.give_way(self.cycle, order[-1])
            plan = without_row(plan, order.pop())
        return plan

    def _lacks_memory(self, plan: Plan, order: Sequence[int]) -> bool:
        """Return whether a planned row lacks KV memory; False if the check fails.

        The target's pass then takes the memory that it needs, or fails.
        """
        with self._faults.part("rows"):
            return len(self._executor.lacking(plan, order)) > 0
        return False

    def _alone(self) -> Plan:
        left = self._executor.unread(self._book.running)
        return target_alone(self._names[-1], left, self._prefill_chunk)

    def _view(
        self, cycle: int, waiting: Sequence[RunningRequest], standing: Standing
    ) -> EngineView:
        available = self.quarantine.available(self._names, cycle)
        return self.views.build(cycle, waiting, available, standing)

    def _run(self, plan: Plan) -> CycleResult:
        """Run a plan; if the target fails, end the plan's requests and return an empty result.

        Raises the target's error after `MOST_TARGET_FAILURES` failures in consecutive cycles.
        """
        try:
            result = self._executor.run(plan)
        except TargetError as error:
            for row in plan.rows:
                self._book.end(self._book.running[row], "error", str(error))
            self._target_failures += 1
            if self._target_failures >= MOST_TARGET_FAILURES:
                raise
            return CycleResult(failures=list(error.failures), is_regular=False)
        if self._book.is_abandoned:  # the cycle was stuck, and the requests have been ended
            raise RuntimeError("a cycle has ended after its engine")
        self._target_failures = 0
        return result

    def _deliver(self, result: CycleResult, budget_nodes: int | None) -> list[int]:
        """Give committed tokens to the requests, and end those that are done.

        Tokens are counted before they are delivered. `budget_nodes`: see `CyclePlan`. Returns the
        number of new tokens of each text.
        """
        book = self._book
        rows = [(book.running[commit.row], commit) for commit in result.commits]
        news = [(request, commit, _delta_of(request, commit)) for request, commit in rows]
        self._faults.each(
            "accounts",
            self._hand_out,
            lambda: self.counts.record([_gain(*each) for each in news], budget_nodes),
        )
        for request, _, delta in news:
            if request.finished:
                book.conclude(request, delta)
            else:
                request.handle.deliver(delta)
        for row, error in result.errors.items():
            if row in book.running:  # else its text has ended before the position that failed
                book.end(book.running[row], "error", error)
        return [len(delta.token_ids) for _, _, delta in news]

    def _hand_out(self) -> None:
        """Deliver newly read keys and values of requests that another process continues."""
        for row, request in self._book.running.items():
            if request.spec.prefill_only:
                part = self._executor.hand_over.read_since(row, request.handed_tokens)
                if part is not None:
                    request.handed_tokens = part.stop
                    request.handle.deliver(Delta(index=request.spec.sample, kv=part))

    def _learn(self, plan: Plan, result: CycleResult, elapsed_s: float) -> None:
        self.counts.record_cycle(elapsed_s)
        self._profiler.record_switches(len(plan.records))
        learn_cycle(self._profiler, plan, result, elapsed_s * 1000)
        self.cycles.note(plan, result, elapsed_s * 1000, self._profiler.spent_ms())

    def _begin(self) -> None:
        book = self._book
        asked = [request.spec.speculation for request in book.running.values()]
        is_open = all(
            one is None or (one != "off" and not (one.chain or one.depth or one.width))
            for one in asked
        )
        self.planning.begin(0 if book.has_objectives else len(asked), is_open)

    def _measure(
        self, is_usual: bool, result: CycleResult, produced: Sequence[int], elapsed_s: float
    ) -> None:
        """Record a cycle without failures for the speedup by drafts.

        `is_usual`: it ran as planned, and loaded no model.
        """
        if is_usual and not (result.failures or result.errors or result.selection_failed):
            drafted = any(commit.drafted for commit in result.commits)
            self.planning.measure(drafted, produced, elapsed_s * 1000)


def _delta_of(request: RunningRequest, commit: Commit) -> Delta:
    """Return a request's delta for its tokens; an error if its text cannot be made."""
    try:
        return request.accept(
            commit.tokens,
            commit.chain,
            commit.logprobs,
            commit.prompt_logprobs,
            commit.drafted,
            commit.draft,
        )
    except Exception as error:
        logger.exception("request %d cannot go on", request.handle.request_id)
        return last_delta(request, "error", f"the tokens could not be made text: {error}")


def _gain(request: RunningRequest, commit: Commit, delta: Delta) -> Gain:
    tokens, produced = len(commit.tokens), len(delta.token_ids)
    return Gain(commit.chain, commit.drafted, tokens, produced, request.last_gap_s)
