"""Planner: the whole plan of a cycle, from a view of the engine.

Pure: `plan(view, admission) -> Plan`. The only state between cycles goes out with the plan as
`standing` and comes back with the next view.
"""

from collections.abc import Sequence
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
from specrouter.routing.cycle_budget import bounded, nodes_within
from specrouter.routing.cycle_routes import Cycle, CycleRoutes, routes_of
from specrouter.routing.decision_record import DecisionRecord
from specrouter.routing.decisions import workload_of
from specrouter.routing.route import Prefill
from specrouter.routing.scheduler import ModelChainScheduler
from specrouter.routing.shadow_policy import next_shadow_evaluation
from specrouter.slo.admission import Admission
from specrouter.slo.node_selection import rates_of
from specrouter.slo.tree_planner import TreePlanner, cycle_cost
from specrouter.view import SCHEDULED, EngineView, RequestTable, Standing

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
        running = view.running.by_row()
        is_reading = running.unread > 0
        prefill = _prefill(running.take(is_reading), admission) if is_reading.any() else Prefill()
        requests = running.take(~(is_reading | running.among(admission.paused)))
        if not len(requests):
            groups = self._with_first_tokens([], prefill)
            standing = replace(view.standing, waited={}, foreseen={})
            return Plan(
                groups=groups,
                prefill_rows=prefill.rows,
                prefill_counts=prefill.counts,
                standing=standing,
            )
        waited = view.standing.waited
        cycle = Cycle(
            scheduler=self.scheduler,
            trees=self.trees,
            view=view,
            admission=admission,
            prefill=prefill,
            requests=requests,
            rates=rates_of(requests),
            waited=np.array([waited.get(one, 0) for one in requests.id.tolist()], dtype=np.int64),
            depths=self.scheduler.policy.depths(view),
        )
        routes = routes_of(cycle, self.prefill_chunk)
        evaluation = self._evaluation(routes)
        selector, budget = None, None
        selected = [route for route in routes.members if not route.whole]
        if any(len(route.chain) > 1 for route in selected):
            selector, budget = self._selector(routes)
        elif selected:  # only text drafters draft, and often find nothing
            selector = partial(self._select_late, routes)
        groups = self._with_first_tokens(_groups(routes), prefill)
        groups = self._quoting(routes, groups)
        standing = _standing(routes, evaluation)
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

    def _evaluation(self, routes: CycleRoutes) -> ShadowEvaluation | None:
        """Return the shadow evaluation beside this cycle, on a row that the scheduler routes."""
        cycle, view = routes.cycle, routes.cycle.view
        main = routes.decisions.in_use.get(SCHEDULED)
        # A plan without drafting models may serve many cycles, so the check must not skip plans.
        is_rare = all(len(route.chain) == 1 for route in routes.members)
        is_asked = is_rare or not view.cycle % _EVALUATE_EVERY
        if not is_asked or cycle.prefill.tokens or main is None:
            return None
        decision = main.decision
        is_routed = np.array([asked is None for asked in cycle.requests.override])
        if (
            not view.drafts
            or decision.predicted is None
            or not is_routed.any()
            or not self.scheduler.policy.evaluates
        ):
            return None
        routed = cycle.requests.take(is_routed)
        workload = workload_of(routed)
        return next_shadow_evaluation(
            view,
            decision,
            routed.take(routed.sampled == workload.sampled),
            workload,
            view.available.difference(*(route.chain for route in routes.members)),
        )

    def _select_late(
        self, routes: CycleRoutes, rows: Ints, candidates: Candidates, aside: int
    ) -> Bools:
        selector, _ = self._selector(routes)
        return selector(rows, candidates, aside)

    def _quoting(self, routes: CycleRoutes, groups: list[ChainGroup]) -> list[ChainGroup]:
        """Add the cost of verification to groups with a text drafter, if the time is free for that.

        It is where no other model drafts, no request is in need, and no budget or number of nodes
        is set.
        """
        cycle = routes.cycle
        is_free = not (cycle.rates.any() or cycle.admission.has_budget)
        if not is_free or any(len(group.chain) > 1 for group in groups):
            return groups
        if self.trees.config.budget_tokens is not None or self.scheduler.config.nodes is not None:
            return groups
        workload = routes.workload()
        ms = quoted_ms(cycle.view.performance, workload, self.scheduler.target)
        count = workload.batch
        return [replace(one, quoted_ms=ms, requests=count) if one.quotes else one for one in groups]

    def _selector(self, routes: CycleRoutes) -> tuple[TreeSelector, int]:
        """Return the selector for groups whose trees are not verified whole, and its budget."""
        cycle = routes.cycle
        snapshot, prompt_tokens = cycle.view.performance, cycle.prefill.tokens
        known = [
            (routes.predicted[route], int(who.sum()))
            for route, who in routes.members.items()
            if route in routes.predicted
        ]
        target = self.scheduler.target
        workload = routes.workload()
        active = workload.requests
        budget_tokens = self.trees.config.budget_tokens
        if budget_tokens is None:
            budget_nodes = sum(option.shape.nodes * count for option, count in known)
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
        within = nodes_within(cycle.admission, cost, len(cost.ms) - 1)
        budget_nodes = min(budget_nodes, within)
        selector = self.trees.selector(cycle.requests, cost, budget_nodes)
        if cycle.admission.has_budget:
            selector = bounded(selector, within)
        return selector, budget_nodes


def _prefill(reading: RequestTable, admission: Admission) -> Prefill:
    """Return the prompt tokens that admission gives to the requests with unread prompts."""
    chunks = np.array([admission.chunks.get(one, 0) for one in reading.id.tolist()], dtype=np.int64)
    ends = chunks > reading.unread
    reads = (chunks > 0) & ~ends
    tokens = int(chunks[reads | ends].sum())
    return Prefill(reading.row[reads], chunks[reads], reading.row[ends], tokens, len(reading))


def _groups(routes: CycleRoutes) -> list[ChainGroup]:
    """Return the groups, each with the prediction that this cycle's outcome is compared with."""
    members = routes.members
    drafting = [route for route in members if len(route.chain) > 1]
    is_quiet = not routes.cycle.prefill.tokens and not routes.catch_up.leaves_out
    groups = []
    for route, who in members.items():
        predicted = routes.predicted.get(route)
        if predicted is not None and not predicted.plain_ms:
            predicted = None  # it is not of this cycle
        # The time of the whole cycle was predicted only if this is the only (drafting) group.
        is_whole = len(members) == 1 or drafting == [route]
        if predicted is not None and not (is_whole and is_quiet):
            predicted = replace(predicted, plain_ms=0.0)
        groups.append(route.group(routes.cycle.requests.row[who], predicted))
    return groups


def _lasts(group: ChainGroup) -> bool:
    """Return whether a group drafts nothing but quotations whose cost is known."""
    return len(group.chain) == 1 and (group.quotes is None or group.quoted_ms is not None)


def _standing(routes: CycleRoutes, evaluation: ShadowEvaluation | None) -> Standing:
    cycle, waiting = routes.cycle, routes.waiting
    ids, waited = cycle.requests.id[waiting].tolist(), cycle.waited[waiting].tolist()
    evaluated_at = cycle.view.standing.evaluated_at if evaluation is None else cycle.view.cycle
    return Standing(
        in_use=routes.decisions.in_use,
        waited={one: cycles + 1 for one, cycles in zip(ids, waited, strict=True)},
        foreseen=routes.foreseen,
        evaluated_at=evaluated_at,
        memories={each: one.memory for each, one in (cycle.depths or {}).items()},
    )
