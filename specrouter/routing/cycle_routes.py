"""CycleRoutes: the route of each request of a cycle, and the requests that sit out.

It uses the decisions in use, or has them made anew, honours the overrides of single requests, and
gives this one cycle the trees that suit it. An instance serves one view.

Not here: the rest of a plan (`specrouter.routing.planner`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from specrouter.cycle import DraftShape, Option
from specrouter.profile.cycle_times import Workload
from specrouter.profile.snapshot import outcome_of
from specrouter.request.params import Chain, Speculation
from specrouter.request.spec import SpeculationOverride
from specrouter.routing.catch_up import CycleCatchUp, Drafting, gain_ms
from specrouter.routing.chain_policy import DEFAULT_DEPTH, Models, RequestDepth, fitting_width
from specrouter.routing.cycle_budget import cut_to_budget
from specrouter.routing.decisions import INTERVAL, CycleDecisions, workload_of
from specrouter.routing.route import Asked, Prefill, Route, by_what_they_ask, nodes_of, route_ms
from specrouter.routing.scheduler import ModelChainScheduler
from specrouter.slo.admission import Admission
from specrouter.slo.cycle_shape import Beside
from specrouter.slo.node_selection import Progress
from specrouter.slo.tree_planner import TreePlanner, cycle_cost
from specrouter.view import SCHEDULED, ChainDecision, EngineView, Override, RequestView

Ints = NDArray[np.int64]


@dataclass(kw_only=True)
class CycleRoutes:
    """The routes of one cycle.

    Attributes, after `find` has been called:
        members: rows of the requests that take part, by route.
        predicted: predicted tokens and costs of a route.
        waiting: rows that sit out.
    """

    scheduler: ModelChainScheduler
    trees: TreePlanner
    view: EngineView
    decisions: CycleDecisions
    catch_up: CycleCatchUp
    prefill: Prefill
    requests: Mapping[int, RequestView]  # the decoding requests, by row
    progress: Progress  # of the same
    admission: Admission
    depths: Mapping[int, RequestDepth] | None = None  # by id, if each request has its own
    members: dict[Route, list[int]] = field(default_factory=dict)
    predicted: dict[Route, Option] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    foreseen: dict[tuple[object, ...], tuple[int, Option]] = field(default_factory=dict)

    def find(self) -> None:
        held: frozenset[str] = frozenset()  # models of the groups before
        for asked in by_what_they_ask(self.requests, self.scheduler.target, self.view.available):
            if asked.key is None:
                held |= self._route_named(asked, held)
            else:
                held |= self._route_scheduled(asked.key, asked.requests, held)
        if self.admission.has_budget:
            self._cut()
        self._foresee()

    def workload(self) -> Workload:
        """Return the workload of the requests that take part."""
        rows = [row for rows in self.members.values() for row in rows]
        return workload_of([self.requests[row] for row in rows], with_lags=False)

    def _cut(self) -> None:
        cuts = cut_to_budget(self.admission, self.members, self._whole_nodes, self._ms)
        for route, cut in cuts.items():
            if cut != route:
                self.members.setdefault(cut, []).extend(self.members.pop(route))
                self.predicted.pop(route, None)

    def _whole_nodes(self, route: Route) -> int:
        """Return the nodes of a request's tree if all of it is verified, else 0.

        Each intermediate may lengthen a path.
        """
        if len(route.chain) == 1 or not route.whole:
            return 0
        return nodes_of(route) + len(route.chain) - 2

    def _ms(self, shares: Sequence[tuple[Route, int]]) -> float:
        """Return the predicted time of a cycle in which routes have so many requests each.

        The target verifies the nodes that the routes plan for, within the budget.
        """
        snapshot, target = self.view.performance, self.scheduler.target
        work = workload_of(list(self.requests.values()), with_lags=False)
        nodes, levels_ms = 0, 0.0
        for route, count in shares:
            if len(route.chain) > 1:
                planned = route.shape.nodes or nodes_of(route)
                nodes += count * (self._whole_nodes(route) or min(planned, nodes_of(route)))
                levels_ms += route_ms(snapshot, replace(work, requests=count), route)
        if self.admission.budget_nodes is not None:
            nodes = min(nodes, self.admission.budget_nodes)
        alone = outcome_of(snapshot, (target,), work.requests, work.sampled)
        factor, before_ms = snapshot.machine * alone.time, self.catch_up.ms
        cost = cycle_cost(
            snapshot,
            work,
            target,
            snapshot.machine * levels_ms + before_ms,
            self.prefill.tokens,
            factor,
        )
        return cost.whole_ms(nodes)

    def _route_named(self, asked: Asked, held: frozenset[str]) -> frozenset[str]:
        """Route requests that name their chain, or want none. Return the models in use."""
        used = held
        chains: dict[Chain, dict[int, RequestView]] = {}
        for row, request in asked.requests.items():
            route = self._named(asked.chain, request.override, used)
            self.members.setdefault(route, []).append(row)
            chains.setdefault(route.chain, {})[row] = request
            used = used.union(route.chain)
        for chain, those in chains.items():  # caught up at any cost, since it was asked for
            self.catch_up.note(self.catch_up.drafting(chain, those))
        return used

    def _named(self, chain: Chain, override: SpeculationOverride, held: frozenset[str]) -> Route:
        if not isinstance(override, Speculation) or not self.scheduler.fit(chain, held):
            return Route((self.scheduler.target,))
        limits = self.scheduler.limits((override.depth, override.width))
        depth = limits.depth or DEFAULT_DEPTH
        # Trees of a named chain are verified whole, unless a selection was configured.
        is_open = self.trees.config.selection is None and self.scheduler.config.nodes is None
        whole = is_open or self._is_whole(chain)
        shape = DraftShape(depth, fitting_width(depth, limits.width or 1))
        return Route(chain, shape, whole)

    def _route_scheduled(
        self, key: Override, requests: Mapping[int, RequestView], held: frozenset[str]
    ) -> frozenset[str]:
        """Route requests that leave the chain to the scheduler. Return the models in use."""
        if not self.view.drafts:
            self.members.setdefault(Route((self.scheduler.target,)), []).extend(requests)
            return held
        models = Models(self.view.available, held)
        decision = self.decisions.decide(key, requests, models)
        decided = decision.predicted
        later, alone = decided or _unpredicted(decision), Option(chain=(self.scheduler.target,))
        spare = None if len(later.chain) > 1 else self._spare_chain(decision, models)
        main, waiting, drafting = self._for_cycle(decision, later, spare, requests)
        self.waiting |= waiting
        found: dict[tuple[int, int | None], tuple[Option, list[int]]] = {}
        for row, option in drafting.options(requests, main, later, alone).items():
            if row not in waiting:
                cap = self._deepest(requests[row].id)
                found.setdefault((id(option), cap), (option, []))[1].append(row)
        for (_, cap), (option, each) in found.items():
            rows = self._at_once(option, {row: requests[row] for row in each})
            route = self._route(key, option, decision, cap)
            self.members.setdefault(route, []).extend(rows)
            is_cut = cap is not None and cap < option.shape.depth
            is_reshaped = len(option.chain) > 1 and (self.trees.selection.reshapes or is_cut)
            if (option.plain_ms or decided is not None) and not is_reshaped:
                self.predicted[route] = option
            held = held.union(option.chain)
        return held

    def _deepest(self, request: int) -> int | None:
        """Return the most levels to draft for a request, by id; None: no cap."""
        cap = self.admission.depths.get(request)
        if self.depths is None:
            return cap
        levels = self.depths[request].levels
        return levels if cap is None else min(cap, levels)

    def _at_once(self, option: Option, requests: Mapping[int, RequestView]) -> list[int]:
        """Return the rows of a group that draft in this cycle.

        If not all may draft together, those that have waited longest do, and the others sit out.
        """
        if self.depths is None or len(option.chain) == 1:
            return list(requests)
        waited = self.view.standing.waited
        order = sorted(requests, key=lambda row: -waited.get(requests[row].id, 0))
        rows = sorted(order[: min(self.depths[one.id].together for one in requests.values())])
        self.waiting |= requests.keys() - set(rows)
        return rows

    def _route(
        self, key: Override, option: Option, decision: ChainDecision, cap: int | None
    ) -> Route:
        """Return the route of an option. `cap`: the most levels to draft; None: no cap."""
        if cap == 0:
            return Route((self.scheduler.target,))
        # Options have shapes of the grid: the next larger one than asked for, or else the largest.
        limits, shape = self.scheduler.limits(key), option.shape
        depth = limits.depth or shape.depth if shape.depth else 1
        depth = min(depth, cap or depth)
        width = fitting_width(depth, min(shape.width, limits.width or shape.width))
        drafted = DraftShape(depth, width)
        quotes = None  # allowed only if a selector drops nodes that do not pay
        if self.trees.selection.takes_quotations and cap is None:
            quotes = self.scheduler.quoter(option.chain, decision, key, self.view.available)
        return Route(
            option.chain,
            drafted,
            quotes is None and self._is_whole(option.chain),
            self._form(drafted) if len(option.chain) > 1 and key == SCHEDULED else None,
            quotes,
        )

    def _form(self, shape: DraftShape) -> tuple[int, ...] | None:
        """Return the fixed form of trees, if there is one and it has this shape.

        It does not where requests ask for another depth or width, where only paths are drafted, or
        where admission allows fewer levels.
        """
        form = self.trees.branching
        fits = form is not None and (len(form), prod(form)) == (shape.depth, shape.width)
        return form if fits else None

    def _is_whole(self, chain: Chain) -> bool:
        return len(chain) == 1 or self.trees.selection.takes_whole_trees

    def _spare_chain(self, decision: ChainDecision, models: Models) -> Chain | None:
        """Return the best loaded chain that could draft at once for requests in need.

        Their cycle leaves no time to load a model.
        """
        for chain in (option.chain for option in decision.alternatives):
            is_ready = self.view.loaded.issuperset(chain[:-1])
            if is_ready and self.scheduler.may_use(chain, models):
                return chain
        return None

    def _for_cycle(
        self,
        decision: ChainDecision,
        main: Option,
        spare: Chain | None,
        requests: Mapping[int, RequestView],
    ) -> tuple[Option, frozenset[int], Drafting]:
        """Choose the option for this one cycle, the rows that sit out, and the rows that may draft.

        Args:
            decision: the decision in use.
            main: its option.
            spare: chain that may draft where the target alone was decided on.
            requests: the requests of the decision, by row.
        """
        snapshot, drafts = self.view.performance, len(main.chain) > 1
        if not drafts and not (self.progress.rates > 0.0).any():
            spare = None  # no request is in need
        # Drafts that were decided on pay in the long run: drafters read for them in any case.
        gain = gain_ms(decision, snapshot.machine) if drafts else None
        drafting = self.catch_up.drafting(spare or main.chain, requests, gain)
        alone = main if not drafts else Option(chain=(self.scheduler.target,))
        if not drafting.able:
            if drafts:
                self.catch_up.note(drafting)
            return alone, frozenset(), drafting if drafts else Drafting(able=frozenset())
        progress = self.progress.of(np.array(sorted(drafting.able), dtype=np.int64))
        grid = decision.grids.get(spare or main.chain)
        beside = self._beside(progress, drafting, drafting.able_share if drafts else 1.0)
        choice = self.trees.choose(snapshot, main, grid, progress, beside)
        found = choice.option or alone
        if drafts or len(found.chain) > 1:
            self.catch_up.note(drafting, len(found.chain) > 1)
        if not drafts:
            drafting = replace(drafting, reads=frozenset())
        if choice.option is None and (self.prefill.tokens or not choice.active.all()):
            found = replace(alone, plain_ms=0.0)  # its prediction is not of this cycle
        return found, frozenset(progress.rows[~choice.active].tolist()), drafting

    def _beside(self, progress: Progress, drafting: Drafting, at_once: float) -> Beside:
        """Return the other work of the cycle.

        `at_once` is the share of the reading that rows which draft in this cycle need.
        """
        return Beside(
            self.prefill.tokens,
            len(self.progress.rows) - len(progress.rows),
            self.catch_up.ms + (1.0 - at_once) * drafting.ms,
            at_once * drafting.ms,
        )

    def _foresee(self) -> None:
        """Add predictions of the routes that have none, to learn from their outcomes too."""
        for route, rows in self.members.items():
            if route in self.predicted:
                continue
            others = len(self.requests) - len(rows)
            key = route, len(rows), others  # outcomes are learned by the number of requests
            known = self.view.standing.foreseen.get(key)
            if known is None or self.view.cycle - known[0] >= INTERVAL:
                known = self.view.cycle, self._predict(route, rows, others)
            self.foreseen[key] = known
            self.predicted[route] = known[1]

    def _predict(self, route: Route, rows: list[int], others: int) -> Option:
        workload = workload_of([self.requests[row] for row in rows])
        return self.scheduler.predict(
            self.view.performance,
            replace(workload, others=others),
            route.chain,
            replace(route.shape, nodes=self.scheduler.config.nodes or 0),
            route.whole,
        )


def _unpredicted(decision: ChainDecision) -> Option:
    """Return the option of a policy that predicts nothing."""
    return Option(chain=decision.chain, shape=decision.shape)
