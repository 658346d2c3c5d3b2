"""Planner: the whole plan of a cycle, from a view of the engine.

Pure: `plan(view, admission) -> Plan`. The only state between cycles goes out with the plan as
`standing` and comes back with the next view.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from specrouter.cycle import (
    Candidates,
    ChainGroup,
    CyclePlan,
    DraftShape,
    ShadowEvaluation,
    TreeSelector,
)
from specrouter.profile.cycle_times import quoted_ms
from specrouter.profile.snapshot import outcome_of
from specrouter.routing.catch_up import CycleCatchUp
from specrouter.routing.cycle_budget import bounded, nodes_within
from specrouter.routing.cycle_routes import CycleRoutes
from specrouter.routing.decision_record import DecisionRecord
from specrouter.routing.decisions import CycleDecisions, rows_of_mode, workload_of
from specrouter.routing.route import Prefill
from specrouter.routing.scheduler import ModelChainScheduler
from specrouter.routing.shadow_policy import next_shadow_evaluation
from specrouter.slo.admission import Admission
from specrouter.slo.node_selection import Progress
from specrouter.slo.tree_planner import TreePlanner, cycle_cost
from specrouter.slo.value import needed_rates
from specrouter.view import SCHEDULED, EngineView, RequestView, Standing

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_EVALUATE_EVERY = 4  # cycles between the checks for a shadow evaluation


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan(CyclePlan):
    """A cycle's plan, and the state that it leaves behind.

    Attributes:
        standing: state for the next view.
        records: switches, without their time.
        lasts: the plan holds for the same rows in later cycles too: nothing in it is of one cycle
            only.
    """

    standing: Standing = field(default_factory=Standing)
    records: tuple[DecisionRecord, ...] = ()
    lasts: bool = False


@dataclass(frozen=True)
class Planner:
    """The planner of an engine.

    Args:
        prefill_chunk: tokens that a drafter reads at most in a cycle.
    """

    scheduler: ModelChainScheduler
    trees: TreePlanner
    prefill_chunk: int

    def plan(self, view: EngineView, admission: Admission) -> Plan:
        """Plan the running requests' next cycle, with the prompt chunks that admission gives."""
        prefill = _prefill(view, admission)
        requests = {
            row: one
            for row, one in view.by_row.items()
            if not one.prompt_left and one.id not in admission.paused
        }
        if not requests:
            groups = self._with_first_tokens([], prefill)
            standing = replace(view.standing, waited={}, foreseen={})
            return Plan(
                groups=groups,
                prefill_rows=prefill.rows,
                prefill_counts=prefill.counts,
                standing=standing,
            )
        routes = self._routes(view, requests, prefill, admission)
        evaluation = self._evaluation(view, routes)
        selector, budget = None, None
        selected = [route for route in routes.members if not route.whole]
        if any(len(route.chain) > 1 for route in selected):
            selector, budget = self._selector(view, routes)
        elif selected:  # only text drafters draft, and often find nothing
            selector = partial(self._select_late, view, routes)
        groups = self._with_first_tokens(_groups(routes, prefill), prefill)
        groups = self._quoting(view, routes, groups)
        standing = _standing(view, routes, evaluation)
        return Plan(
            groups=groups,
            prefill_rows=prefill.rows,
            prefill_counts=prefill.counts,
            selector=selector,
            shadow_evaluation=evaluation,
            budget_nodes=budget,
            standing=standing,
            records=tuple(routes.decisions.records),
            lasts=not prefill.tokens and evaluation is None and all(map(_lasts, groups)),
        )

    def _with_first_tokens(
        self, groups: Sequence[ChainGroup], prefill: Prefill
    ) -> list[ChainGroup]:
        if not len(prefill.first_tokens):
            return list(groups)
        return [
            *groups,
            ChainGroup(
                chain=(self.scheduler.target,), shape=DraftShape(1), rows=prefill.first_tokens
            ),
        ]

    def _routes(
        self,
        view: EngineView,
        requests: Mapping[int, RequestView],
        prefill: Prefill,
        admission: Admission,
    ) -> CycleRoutes:
        catch_up = CycleCatchUp(self.prefill_chunk, view, len(requests) + prefill.requests)
        routes = CycleRoutes(
            scheduler=self.scheduler,
            trees=self.trees,
            view=view,
            decisions=CycleDecisions(
                scheduler=self.scheduler,
                view=view,
                catch_up=catch_up,
                decoding=len(requests),
                reading=prefill.requests,
            ),
            catch_up=catch_up,
            prefill=prefill,
            requests=requests,
            progress=progress_of(requests, view.standing.waited),
            admission=admission,
            depths=self.scheduler.policy.depths(view),
        )
        routes.find()
        return routes

    def _evaluation(self, view: EngineView, routes: CycleRoutes) -> ShadowEvaluation | None:
        """Return the shadow evaluation beside this cycle, on a row that the scheduler routes."""
        main = routes.decisions.in_use.get(SCHEDULED)
        # A plan without drafting models may serve many cycles, so the check must not skip plans.
        is_rare = all(len(route.chain) == 1 for route in routes.members)
        is_asked = is_rare or not view.cycle % _EVALUATE_EVERY
        if not is_asked or routes.prefill.tokens or main is None:
            return None
        decision = main.decision
        routed = {row: one for row, one in routes.requests.items() if one.override is None}
        if (
            not view.drafts
            or decision.predicted is None
            or not routed
            or not self.scheduler.policy.evaluates
        ):
            return None
        workload = workload_of(list(routed.values()))
        return next_shadow_evaluation(
            view,
            decision,
            rows_of_mode(routed, workload.sampled),
            workload,
            view.available.difference(*(route.chain for route in routes.members)),
        )

    def _select_late(
        self, view: EngineView, routes: CycleRoutes, rows: Ints, candidates: Candidates, aside: int
    ) -> Bools:
        selector, _ = self._selector(view, routes)
        return selector(rows, candidates, aside)

    def _quoting(
        self, view: EngineView, routes: CycleRoutes, groups: list[ChainGroup]
    ) -> list[ChainGroup]:
        """Add the cost of verification to groups with a text drafter, if the time is free for that.

        It is where no other model drafts, no request is in need, and no budget or number of nodes
        is set.
        """
        is_free = not (routes.progress.rates.any() or routes.admission.has_budget)
        if not is_free or any(len(group.chain) > 1 for group in groups):
            return groups
        if self.trees.config.budget_tokens is not None or self.scheduler.config.nodes is not None:
            return groups
        workload = routes.workload()
        ms = quoted_ms(view.performance, workload, self.scheduler.target)
        count = workload.batch
        return [replace(one, quoted_ms=ms, requests=count) if one.quotes else one for one in groups]

    def _selector(self, view: EngineView, routes: CycleRoutes) -> tuple[TreeSelector, int]:
        """Return the selector for groups whose trees are not verified whole, and its budget."""
        snapshot, prompt_tokens = view.performance, routes.prefill.tokens
        known = [
            (routes.predicted[route], rows)
            for route, rows in routes.members.items()
            if route in routes.predicted
        ]
        target = self.scheduler.target
        workload = routes.workload()
        active = workload.requests
        budget_tokens = self.trees.config.budget_tokens
        if budget_tokens is None:
            budget_nodes = sum(option.shape.nodes * len(rows) for option, rows in known)
        else:  # without roots and prompts
            budget_nodes = max(0, budget_tokens - active - prompt_tokens)
        levels_ms = snapshot.machine * sum(option.levels_ms for option, _ in known)
        # A chain's outcomes depend on what a selection left of its drafts; the cost of the target's
        # pass itself is learned from cycles without drafts.
        alone = outcome_of(snapshot, (target,), active, workload.sampled)
        cost = cycle_cost(
            snapshot,
            workload,
            target,
            levels_ms + routes.catch_up.ms,
            prompt_tokens,
            snapshot.machine * alone.time,
        )
        if budget_tokens is None:
            budget_nodes = cost.filling(budget_nodes)
        within = nodes_within(routes.admission, cost, len(cost.ms) - 1)
        budget_nodes = min(budget_nodes, within)
        selector = self.trees.selector(routes.progress, cost, budget_nodes)
        if routes.admission.has_budget:
            selector = bounded(selector, within)
        return selector, budget_nodes


def _prefill(view: EngineView, admission: Admission) -> Prefill:
    reading = [one for one in view.by_row.values() if one.prompt_left]
    if not reading:
        return Prefill()
    rows = np.array([one.row for one in reading], dtype=np.int64)
    left = np.array([one.prompt_left for one in reading], dtype=np.int64)
    chunks = np.array([admission.chunks.get(one.id, 0) for one in reading], dtype=np.int64)
    ends = chunks > left
    reads = (chunks > 0) & ~ends
    counts = chunks[reads]
    tokens = int(counts.sum() + chunks[ends].sum())
    return Prefill(rows[reads], counts, rows[ends], tokens, len(reading))


def _groups(routes: CycleRoutes, prefill: Prefill) -> list[ChainGroup]:
    """Return the groups, each with the prediction that this cycle's outcome is compared with."""
    members = routes.members
    drafting = [route for route in members if len(route.chain) > 1]
    is_quiet = not prefill.tokens and not routes.catch_up.leaves_out
    groups = []
    for route, rows in members.items():
        predicted = routes.predicted.get(route)
        if predicted is not None and not predicted.plain_ms:
            predicted = None  # it is not of this cycle
        # The time of the whole cycle was predicted only if this is the only (drafting) group.
        is_whole = len(members) == 1 or drafting == [route]
        if predicted is not None and not (is_whole and is_quiet):
            predicted = replace(predicted, plain_ms=0.0)
        groups.append(route.group(rows, predicted))
    return groups


def _lasts(group: ChainGroup) -> bool:
    """Return whether a group drafts nothing but quotations whose cost is known."""
    return len(group.chain) == 1 and (group.quotes is None or group.quoted_ms is not None)


def _standing(
    view: EngineView, routes: CycleRoutes, evaluation: ShadowEvaluation | None
) -> Standing:
    before = view.standing.waited
    waited = {
        request.id: before.get(request.id, 0) + 1
        for row, request in routes.requests.items()
        if row in routes.waiting
    }
    evaluated_at = view.standing.evaluated_at if evaluation is None else view.cycle
    memories = {each: one.memory for each, one in (routes.depths or {}).items()}
    return Standing(routes.decisions.in_use, waited, routes.foreseen, evaluated_at, memories)


def progress_of(requests: Mapping[int, RequestView], waited: Mapping[int, int]) -> Progress:
    """Return the progress of the decoding requests, ordered by row."""
    rows = sorted(requests)
    ordered = [requests[row] for row in rows]
    decode_ms = np.array([one.decode_ms for one in ordered])
    decoded = np.array([one.decoded for one in ordered])
    remaining = np.array([one.remaining for one in ordered])
    tpot_ms = np.array([_tpot_ms(one) for one in ordered])
    cycles = np.array([waited.get(one.id, 0) for one in ordered])
    rates = needed_rates(decode_ms, decoded, remaining, tpot_ms)
    return Progress(
        rows=np.array(rows),
        decode_ms=decode_ms,
        decoded=decoded,
        waited=cycles,
        tpot_ms=tpot_ms,
        rates=rates,
    )


def _tpot_ms(request: RequestView) -> float:
    """Return the TPOT objective; NaN if there is none, or none that can still be attained."""
    return np.nan if request.tpot_ms is None or request.declined else request.tpot_ms
