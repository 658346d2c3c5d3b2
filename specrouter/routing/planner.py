"""RoutePlanner: from the scheduler's decisions to the groups of a cycle.

It honours what single requests ask for, gives one cycle the trees that suit it, has idle drafters
evaluated, and tells the profiler how predictions came out.

Not here: when a decision is made (`specrouter.routing.decision_keeper`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from specrouter.cycle import ChainGroup, CyclePlan, CycleResult, ShadowEvaluation, TreeSelector
from specrouter.profile.prediction import Option, Workload
from specrouter.profile.profiler import PerformanceProfiler
from specrouter.profile.snapshot import load_of, outcome_of
from specrouter.request.params import (
    Chain,
    Speculation,
    fitting_width,
)
from specrouter.request.running import RunningRequest
from specrouter.request.spec import SpeculationOverride
from specrouter.routing.catch_up import CycleCatchUp, Drafting, gain_ms
from specrouter.routing.decision_keeper import (
    INTERVAL,
    SCHEDULED,
    DecisionKeeper,
    InUse,
    Override,
    Reader,
    rows_of_mode,
    workload_of,
)
from specrouter.routing.decision_record import DecisionRecord
from specrouter.routing.route import Route, parties_of
from specrouter.routing.scheduler import FIXED_DEPTH, ChainDecision, ModelChainScheduler, Models
from specrouter.routing.shadow_policy import next_shadow_evaluation
from specrouter.slo.cycle_shape import Beside
from specrouter.slo.tree_planner import Progress, TreePlanner, cycle_cost

Ints = NDArray[np.int64]

_EVALUATE_EVERY = 4  # cycles: how often it is asked whether a drafter is to be evaluated
_MOST_FORESEEN = 64  # predictions that are kept of what requests ask for


@dataclass(frozen=True)
class Reading:
    """What a cycle reads of prompts beside the decoding requests.

    `tokens`: of prompts, and the first tokens' rows; `requests`: whose prompts are not read yet.
    """

    tokens: int = 0
    requests: int = 0


@dataclass(frozen=True, eq=False)
class _Steady:
    """The plan of a cycle after which nothing has changed that it depends on."""

    requests: list[tuple[int, RunningRequest]]
    available: Collection[str]
    main: InUse
    slots: int  # that attention reads
    budget_tokens: int | None
    groups: list[ChainGroup]
    selector: TreeSelector | None


@dataclass
class RoutePlanner:
    scheduler: ModelChainScheduler
    profiler: PerformanceProfiler
    trees: TreePlanner
    prefill_chunk: int  # tokens that a drafter reads at most in a cycle
    # Draft tokens that the cycle's plan is good for; None where whole drafts are verified.
    budget_tokens: int | None = None
    shadow_evaluation: ShadowEvaluation | None = None  # of the cycle that was planned last
    _keeper: DecisionKeeper = field(init=False)
    _catch_up: CycleCatchUp = field(init=False)  # of the cycle that was planned last
    _reading: Reading = Reading()
    # By route, number of requests, and of others beside them: when they were predicted, and what.
    _foreseen_options: dict[tuple[Route, int, int], tuple[int, Option]] = field(
        default_factory=dict
    )
    _expected: dict[int, Option] = field(default_factory=dict)  # by the index of a group
    _steady: _Steady | None = None
    # Requests that sit out, and for how many cycles in a row.
    _waited: dict[RunningRequest, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._keeper = DecisionKeeper(self.scheduler, self.profiler, self.prefill_chunk)

    @property
    def records(self) -> list[DecisionRecord]:
        return self._keeper.records

    def plan(
        self,
        requests: Mapping[int, RunningRequest],
        cycle: int,
        available: Collection[str],
        reader: Reader,
        reading: Reading,
        now: float,
    ) -> tuple[list[ChainGroup], TreeSelector | None]:
        """Chains and trees for the decoding requests, by row, and who picks the trees' nodes.

        Requests whose prompts are still being read will soon decode beside these, so trees that
        would only pay for the few that decode already are not drafted.

        Args:
            now: of `time.perf_counter`.
        """
        self._reading = reading
        self.budget_tokens = None
        self.shadow_evaluation = None
        if not requests:
            self._expected, self._steady = {}, None
            return [], None
        before = self._as_before(requests, cycle, available, reader)
        if before is not None:
            self.budget_tokens = before.budget_tokens
            chains = [group.chain for group in before.groups]
            self.shadow_evaluation = self._next_evaluation(
                requests, cycle, available, chains, reader
            )
            return before.groups, before.selector
        self._steady = None
        self._catch_up = CycleCatchUp(
            self.prefill_chunk,
            partial(self._keeper.snapshot, cycle),
            reader,
            len(requests) + reading.requests,
        )
        progress = progress_of(requests, self._waited, now)
        members, predicted = self._members(requests, cycle, available, reader, progress)
        self._foresee(members, predicted, requests, cycle, reader)
        chains = [route.chain for route in members]
        self.shadow_evaluation = self._next_evaluation(requests, cycle, available, chains, reader)
        self._expected = {
            index: predicted[route]
            for index, route in enumerate(members)
            if route in predicted and predicted[route].plain_ms
        }
        groups = [route.group(rows) for route, rows in members.items()]
        selector = None
        if not all(route.whole for route in members):
            selector = self._selector(members, predicted, progress, reader, cycle)
        main = self._keeper.main
        if main is not None and self._is_plain(requests):
            slots, budget = reader.slots_read(progress.rows), self.budget_tokens
            together = list(requests.items())
            self._steady = _Steady(together, available, main, slots, budget, groups, selector)
        return groups, selector

    def _is_plain(self, requests: Mapping[int, RunningRequest]) -> bool:
        """Whether a cycle depends on nothing but the decision in use: all requests are routed by
        it, none has an objective, nothing is read and no drafter is tried."""
        return (
            not self._reading.tokens
            and not self._catch_up.ms
            and all(
                request.objective is None and request.spec.speculation is None
                for request in requests.values()
            )
        )

    def _as_before(
        self,
        requests: Mapping[int, RunningRequest],
        cycle: int,
        available: Collection[str],
        reader: Reader,
    ) -> _Steady | None:
        """The last plan, if this cycle is like the one it was made for: planning takes time."""
        steady, keeper = self._steady, self._keeper
        if steady is None or keeper.main is not steady.main or self._reading.tokens:
            return None
        rows = np.fromiter(sorted(requests), np.int64)
        is_same = (
            steady.requests == list(requests.items())
            and steady.available == available
            and steady.slots == reader.slots_read(rows)
            and not keeper.is_due(
                steady.main, cycle, len(rows) + self._reading.requests, 0, Models(available)
            )
        )
        return steady if is_same else None

    def _members(
        self,
        requests: Mapping[int, RunningRequest],
        cycle: int,
        available: Collection[str],
        reader: Reader,
        progress: Progress,
    ) -> tuple[dict[Route, list[int]], dict[Route, Option]]:
        """Rows by route, and what the scheduler predicts of its own."""
        keeper, target = self._keeper, self.scheduler.target
        members: dict[Route, list[int]] = {}
        predicted: dict[Route, Option] = {}
        parties = parties_of(requests, target, available, keeper.chain, reader.is_open)
        held: frozenset[str] = frozenset()  # by parties that come first
        for party in parties:
            if party.key is None:
                asked: dict[Chain, dict[int, RunningRequest]] = {}
                for row, request in party.requests.items():
                    route = self._asked(party.chain, request.spec.speculation, held)
                    members.setdefault(route, []).append(row)
                    asked.setdefault(route.chain, {})[row] = request
                    held = held.union(route.chain)
                for chain, those in asked.items():  # caught up whatever it costs
                    self._catch_up.note(self._catch_up.drafting(chain, those))
                continue
            models = Models(available, held)
            found = self._scheduled(party.key, party.requests, cycle, models, reader, progress)
            for row, option, decision in found:
                route = self._route(party.key, option, decision)
                members.setdefault(route, []).append(row)
                is_reshaped = self.trees.reshapes and len(option.chain) > 1
                if (option.plain_ms or decision.predicted is not None) and not is_reshaped:
                    predicted[route] = option
                held = held.union(option.chain)
        return members, predicted

    def _foresee(
        self,
        members: Mapping[Route, Sequence[int]],
        predicted: dict[Route, Option],
        requests: Mapping[int, RunningRequest],
        cycle: int,
        reader: Reader,
    ) -> None:
        """Adds predictions of the routes that nobody predicted."""
        for route, rows in members.items():
            if route not in predicted:
                chosen = {row: requests[row] for row in rows}
                others = len(requests) - len(rows)
                foreseen = self._foreseen(route, chosen, others, cycle, reader)
                if foreseen is not None:
                    predicted[route] = foreseen

    def _route(self, key: Override, option: Option, decision: ChainDecision) -> Route:
        # Options are of the shapes that are known, of which the next larger one may be predicted.
        limits = self.scheduler.limits(*key)
        return Route(
            option.chain,
            min(option.depth, limits.depth or option.depth) or 1,
            min(option.width, limits.width or option.width),
            decision.hard_rejection,
            self._is_whole(option.chain, decision.hard_rejection),
            # Who asks for another depth or width gets no tree of the fixed form.
            self.trees.branching if len(option.chain) > 1 and key == SCHEDULED else None,
        )

    def _next_evaluation(
        self,
        requests: Mapping[int, RunningRequest],
        cycle: int,
        available: Collection[str],
        chains: Sequence[Chain],
        reader: Reader,
    ) -> ShadowEvaluation | None:
        """A drafter that is to be evaluated beside this cycle, on a text that is routed here.

        `chains`: that the cycle drafts with.
        """
        main = self._keeper.main
        is_due = cycle % _EVALUATE_EVERY == 0 and not self._reading.tokens
        if main is None or not is_due:
            return None
        decision = main.decision
        if decision.predicted is None:
            return None
        routed = [row for row in sorted(requests) if requests[row].spec.speculation is None]
        if not routed or self.scheduler.config.policy != "adaptive":
            return None
        snapshot, rows = self._keeper.snapshot(cycle), np.array(routed, dtype=np.int64)
        workload = workload_of([requests[row] for row in routed], rows, reader)
        found = next_shadow_evaluation(
            snapshot,
            decision.predicted,
            decision.predicted_ms,
            rows_of_mode(requests, rows, workload.sampled),
            workload,
            reader.missed,
            reader.evaluable,
            set(available).difference(*chains),
        )
        if found is not None:
            self._keeper.evaluated_at = cycle
        return found

    def _is_whole(self, chain: Chain, hard_rejection: bool) -> bool:
        return len(chain) == 1 or hard_rejection or self.trees.selection == "whole"

    def _selector(
        self,
        members: Mapping[Route, Sequence[int]],
        predicted: Mapping[Route, Option],
        progress: Progress,
        reader: Reader,
        cycle: int,
    ) -> TreeSelector:
        """For groups that do not verify whole trees."""
        snapshot = self._keeper.snapshot(cycle)
        known = [(predicted[route], rows) for route, rows in members.items() if route in predicted]
        active = sum(map(len, members.values()))
        main = max(known, key=lambda each: len(each[1]))[0] if known else None
        factor = snapshot.machine
        if main is not None:
            # A chain's outcomes are of what a selection left of its drafts; what the target's pass
            # costs in itself is told by cycles without drafts.
            alone, sampled = (self.scheduler.target,), main.sampled
            has_run = (alone, load_of(active), sampled) in snapshot.outcomes
            factor *= outcome_of(snapshot, alone if has_run else main.chain, active, sampled).time
        levels_ms = snapshot.machine * sum(option.levels_ms for option, _ in known)
        levels_ms += self._catch_up.ms
        workload = Workload(active, reader.slots_read(progress.rows))
        budget_nodes = self.budget_tokens = self._budget_nodes(known, active)
        cost = cycle_cost(
            snapshot,
            workload,
            self.scheduler.target,
            levels_ms,
            self._reading.tokens,
            factor,
        )
        return self.trees.selector(progress, cost, budget_nodes)

    def _budget_nodes(self, known: Sequence[tuple[Option, Sequence[int]]], active: int) -> int:
        """Draft nodes in the verification budget: its tokens without roots and prompts."""
        budget_tokens = self.trees.config.budget_tokens
        if budget_tokens is not None:
            return max(0, budget_tokens - active - self._reading.tokens)
        return sum(option.nodes * len(rows) for option, rows in known)

    def learn(self, plan: CyclePlan, result: CycleResult, elapsed_ms: float) -> None:
        """How a cycle came out."""
        gained = {commit.row: len(commit.tokens) for commit in result.commits}
        decoded = [row for group in plan.groups for row in group.rows.tolist()]
        is_regular = result.is_regular and not result.failures and not len(plan.prefill_rows)
        stage, is_timely = None, is_regular and not result.caught_up
        if is_timely and gained:
            stage = "drafting" if any(len(group.chain) > 1 for group in plan.groups) else "cycle"
        requests = sum(row in gained for row in decoded)
        self.profiler.record_cycle(elapsed_ms, sum(gained.values()), requests, stage)
        self._keeper.end_cycle(plan)
        if not is_regular:
            return
        drafting = [index for index, group in enumerate(plan.groups) if len(group.chain) > 1]
        for index, option in self._expected.items():
            rows = [
                row
                for row in plan.groups[index].rows.tolist()
                if row in gained and row not in result.cut_rows | result.behind_rows
            ]
            extra = float(sum(gained[row] - 1 for row in rows))
            # The whole cycle was predicted of the only group, or of the only one that drafts.
            is_whole = len(plan.groups) == 1 or drafting == [index]
            is_whole &= is_timely and not self._reading.tokens and not self._catch_up.leaves_out
            self.profiler.record_outcome(
                option.chain,
                len(decoded),
                option.plain_ms if is_whole else 0.0,
                elapsed_ms,
                (option.plain_tokens - 1.0) * len(rows),
                extra,
                option.sampled,
            )

    def forget(self, request: RunningRequest) -> None:
        self._waited.pop(request, None)

    def put_away(self) -> None:
        """Another policy routes from now on: lets go of requests and of what was predicted for
        them. When it is this one's turn again, every decision is due."""
        self._steady, self._expected, self.shadow_evaluation = None, {}, None
        self._foreseen_options.clear()
        self._waited.clear()
        self._keeper.put_away()

    def _foreseen(
        self,
        route: Route,
        requests: Mapping[int, RunningRequest],
        others: int,
        cycle: int,
        reader: Reader,
    ) -> Option | None:
        """The prediction for a route that nobody predicted, so that its outcomes teach too."""
        if route.hard_rejection:
            return None
        key = route, len(requests), others  # outcomes count for the requests that there are
        known = self._foreseen_options.get(key)
        if known is not None and cycle - known[0] < INTERVAL:
            return known[1]
        rows = np.array(sorted(requests), dtype=np.int64)
        workload = replace(workload_of(list(requests.values()), rows, reader), others=others)
        option = self.scheduler.predict(
            self.profiler.snapshot(),
            workload,
            route.chain,
            route.depth,
            route.width,
            self.scheduler.config.nodes,
            route.whole,
        )
        self._foreseen_options.pop(key, None)  # the oldest stand first
        if len(self._foreseen_options) >= _MOST_FORESEEN:
            del self._foreseen_options[next(iter(self._foreseen_options))]
        self._foreseen_options[key] = (cycle, option)
        return option

    def _asked(self, chain: Chain, override: SpeculationOverride, held: Collection[str]) -> Route:
        """The route of a request that names its chain, or wants none."""
        if not isinstance(override, Speculation) or not self.scheduler.fit(chain, held):
            return Route((self.scheduler.target,))
        limits = self.scheduler.limits(override.depth, override.width)
        depth = limits.depth or FIXED_DEPTH
        hard = self.scheduler.config.policy == "paper"
        # Who names a chain gets its trees whole, unless a selection was configured.
        is_open = self.trees.config.selection is None and self.scheduler.config.nodes is None
        return Route(
            chain,
            depth,
            fitting_width(depth, limits.width or 1),
            hard,
            is_open or self._is_whole(chain, hard),
        )

    def _scheduled(
        self,
        key: Override,
        requests: Mapping[int, RunningRequest],
        cycle: int,
        models: Models,
        reader: Reader,
        progress: Progress,
    ) -> "list[tuple[int, Option, ChainDecision]]":
        """What each of the requests goes through that leave the chain to the scheduler."""
        rows = np.array(sorted(requests), dtype=np.int64)
        others = len(progress.rows) - len(rows)
        decision = self._keeper.in_use(
            key, requests, rows, self._reading.requests, others, cycle, models, reader
        )
        decided = decision.predicted
        later, alone = decided or _unpredicted(decision), Option((self.scheduler.target,))
        helper = None if len(later.chain) > 1 else self._helper(decision, models, reader)
        main, waiting, drafting = self._for_cycle(decision, later, helper, requests, progress)
        chosen = drafting.options(requests, main, later, alone)
        self._note_waiting(requests, waiting)
        return [(row, option, decision) for row, option in chosen.items() if row not in waiting]

    def _note_waiting(
        self, requests: Mapping[int, RunningRequest], waiting: Collection[int]
    ) -> None:
        for row, request in requests.items():
            if row in waiting:
                self._waited[request] = self._waited.get(request, 0) + 1
            else:
                self._waited.pop(request, None)

    def _helper(self, decision: ChainDecision, models: Models, reader: Reader) -> Chain | None:
        """The best chain that could draft at once for requests in need: their cycle is no time to
        load a model."""
        for option in self.scheduler.at_hand(decision, models):
            if all(map(reader.is_open, option.chain[:-1])):
                return option.chain
        return None

    def _for_cycle(
        self,
        decision: ChainDecision,
        main: Option,
        helper: Chain | None,
        requests: Mapping[int, RunningRequest],
        everybody: Progress,
    ) -> tuple[Option, frozenset[int], Drafting]:
        """The decision's option with the trees that suit this one cycle, rows that sit out, and who
        drafts if anybody does.

        Args:
            helper: may draft where the target alone was decided on.
            everybody: that decodes, those included that go another way.
        """
        snapshot, drafts = self._keeper.latest, len(main.chain) > 1
        if not drafts and not (everybody.rates > 0.0).any():
            helper = None  # nobody is in need
        # Where drafts are to pay in the long run, what they need is read either way.
        gain = gain_ms(decision, snapshot.machine) if drafts else None
        drafting = self._catch_up.drafting(helper or main.chain, requests, gain)
        alone = main if not drafts else Option((self.scheduler.target,))
        if not drafting.able:
            if drafts:
                self._catch_up.note(drafting)
            return alone, frozenset(), drafting if drafts else Drafting(frozenset())
        progress = everybody.of(np.array(sorted(drafting.able), dtype=np.int64))
        at_once = drafting.able_share if drafts else 1.0
        choice = self.trees.choose(
            snapshot,
            main,
            decision.grids.get(helper or main.chain),
            progress,
            Beside(
                self._reading.tokens,
                len(everybody.rows) - len(progress.rows),
                self._catch_up.ms + (1.0 - at_once) * drafting.ms,
                at_once * drafting.ms,
            ),
        )
        found = choice.option or alone
        if drafts or len(found.chain) > 1:
            self._catch_up.note(drafting, len(found.chain) > 1)
        if not drafts:
            drafting = replace(drafting, reads=frozenset())
        if self._reading.tokens or not choice.active.all():
            alone = replace(alone, plain_ms=0.0)  # predicted for another cycle
        waiting = frozenset(progress.rows[~choice.active].tolist())
        return choice.option or alone, waiting, drafting


def progress_of(
    requests: Mapping[int, RunningRequest], waited: Mapping[RunningRequest, int], now: float
) -> Progress:
    """Of the decoding requests, by row; `now` is of `time.perf_counter`."""
    rows = sorted(requests)
    ordered = [requests[row] for row in rows]
    limits = [request.objective and request.objective.tpot_ms for request in ordered]
    return Progress.made(
        np.array(rows),
        np.array([request.decode_ms(now) for request in ordered]),
        np.array([request.decoded_tokens for request in ordered]),
        np.array([request.remaining for request in ordered]),
        np.array([waited.get(request, 0) for request in ordered]),
        np.array([np.nan if limit is None else limit for limit in limits]),
    )


def _unpredicted(decision: ChainDecision) -> Option:
    """Of a policy that predicts nothing."""
    return Option(
        decision.chain,
        decision.depth,
        decision.width,
        decision.nodes or 0,
    )
