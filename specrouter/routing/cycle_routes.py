"""The route of each request of a cycle, and the requests that sit out.

The decisions in use are used, or made anew. Overrides of single requests are honoured, and this one
cycle gets the trees that suit it.

Not here: the rest of a plan (`specrouter.routing.planner`).
"""

from collections.abc import Collection, Mapping, Sequence
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
from specrouter.routing.chain_policy import DEFAULT_DEPTH, ModelNames, RequestDepth, fitting_width
from specrouter.routing.cycle_budget import cut_to_budget
from specrouter.routing.decisions import INTERVAL, CycleDecisions, workload_of
from specrouter.routing.route import Prefill, Route, nodes_of, route_ms
from specrouter.routing.scheduler import ModelChainScheduler
from specrouter.slo.admission import Admission
from specrouter.slo.cycle_shape import Beside
from specrouter.slo.tree_planner import TreePlanner, cycle_cost
from specrouter.view import SCHEDULED, ChainDecision, EngineView, Override, RequestTable

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False, kw_only=True)
class Cycle:
    """The inputs of a cycle's routes.

    Attributes:
        requests: the decoding requests, by row.
        rates: [R] tokens per millisecond that each needs, see `needed_rates`.
        waited: [R] cycles in a row that each has sat out.
        depths: by request id, if each request has its own.
    """

    scheduler: ModelChainScheduler
    trees: TreePlanner
    view: EngineView
    admission: Admission
    prefill: Prefill
    requests: RequestTable
    rates: Floats
    waited: Ints
    depths: Mapping[int, RequestDepth] | None = None


@dataclass(kw_only=True)
class CycleRoutes:
    """The routes of one cycle, with what they were decided by.

    Attributes:
        members: mask [R] of the requests of each route.
        predicted: predicted tokens and costs of a route.
        waiting: mask [R] of the requests that sit out.
        foreseen: see `Standing`.
    """

    cycle: Cycle
    decisions: CycleDecisions
    catch_up: CycleCatchUp
    waiting: Bools
    members: dict[Route, Bools] = field(default_factory=dict)
    predicted: dict[Route, Option] = field(default_factory=dict)
    foreseen: dict[tuple[object, ...], tuple[int, Option]] = field(default_factory=dict)

    def workload(self) -> Workload:
        """Return the workload of the requests that take part."""
        takes_part = np.any([*self.members.values(), np.zeros_like(self.waiting)], axis=0)
        return workload_of(self.cycle.requests.take(takes_part), with_lags=False)

    def add(self, route: Route, who: Bools) -> None:
        """Add the requests of a mask [R] to a route."""
        known = self.members.get(route)
        self.members[route] = who if known is None else known | who


def routes_of(cycle: Cycle, prefill_chunk: int) -> CycleRoutes:
    """Return the routes of a cycle; a drafter reads at most `prefill_chunk` tokens in it."""
    view, requests, prefill = cycle.view, cycle.requests, cycle.prefill
    catch_up = CycleCatchUp(prefill_chunk, view.performance, len(requests) + prefill.requests)
    decisions = CycleDecisions(
        scheduler=cycle.scheduler,
        view=view,
        catch_up=catch_up,
        decoding=len(requests),
        reading=prefill.requests,
    )
    none = np.zeros(len(requests), dtype=np.bool_)
    routes = CycleRoutes(cycle=cycle, decisions=decisions, catch_up=catch_up, waiting=none)
    held: frozenset[str] = frozenset()  # models of the groups before
    for key, chain, who in _by_override(requests, cycle.scheduler.target, view.available):
        if key is None:
            held |= _route_named(routes, chain, who, held)
        else:
            held |= _route_scheduled(routes, key, who, held)
    if cycle.admission.has_budget:
        _cut(routes)
    _foresee(routes)
    return routes


def _by_override(
    requests: RequestTable, target: str, available: Collection[str]
) -> list[tuple[Override | None, Chain, Bools]]:
    """Return all requests in groups that leave the same things open: key, chain, and mask [R].

    The key is that of their decision, or None if they name the chain or want none. The groups with
    the most requests come first: they get their models if not all fit in memory.
    """
    found: dict[tuple[Override | None, Chain], list[int]] = {}
    for place, asked in enumerate(requests.override):
        key: Override | None = None
        chain: Chain = (target,)
        if asked is None:
            key = SCHEDULED
        elif isinstance(asked, Speculation) and asked.chain is not None:
            chain = (*(name for name in asked.chain[:-1] if name in available), target)
        elif isinstance(asked, Speculation):
            key = (asked.depth, asked.width)
        found.setdefault((key, chain), []).append(place)
    groups = sorted(found.items(), key=lambda one: (-len(one[1]), one[0][0] is not None))
    return [(key, chain, _mask(len(requests), places)) for (key, chain), places in groups]


def _mask(count: int, places: Sequence[int] | Ints) -> Bools:
    found = np.zeros(count, dtype=np.bool_)
    found[places] = True
    return found


def _cut(routes: CycleRoutes) -> None:
    """Shrink trees to the budget that admission leaves."""
    counts = {route: int(who.sum()) for route, who in routes.members.items()}
    cuts = cut_to_budget(
        routes.cycle.admission, counts, _whole_nodes, lambda shares: _ms(routes, shares)
    )
    for route, cut in cuts.items():
        if cut != route:
            routes.add(cut, routes.members.pop(route))
            routes.predicted.pop(route, None)


def _whole_nodes(route: Route) -> int:
    """Return the nodes of a request's tree if all of it is verified, else 0.

    Each intermediate may lengthen a path.
    """
    if len(route.chain) == 1 or not route.whole:
        return 0
    return nodes_of(route) + len(route.chain) - 2


def _ms(routes: CycleRoutes, shares: Sequence[tuple[Route, int]]) -> float:
    """Return the predicted time of a cycle in which routes have so many requests each.

    The target verifies the nodes that the routes plan for, within the budget.
    """
    cycle = routes.cycle
    snapshot, target = cycle.view.performance, cycle.scheduler.target
    work = workload_of(cycle.requests, with_lags=False)
    nodes, levels_ms = 0, 0.0
    for route, count in shares:
        if len(route.chain) > 1:
            planned = route.shape.nodes or nodes_of(route)
            nodes += count * (_whole_nodes(route) or min(planned, nodes_of(route)))
            levels_ms += route_ms(snapshot, replace(work, requests=count), route)
    if cycle.admission.budget_nodes is not None:
        nodes = min(nodes, cycle.admission.budget_nodes)
    alone = outcome_of(snapshot, (target,), work.requests, work.sampled)
    factor, before_ms = snapshot.machine * alone.time, routes.catch_up.ms
    cost = cycle_cost(
        snapshot,
        work,
        target,
        snapshot.machine * levels_ms + before_ms,
        cycle.prefill.tokens,
        factor,
    )
    return cost.whole_ms(nodes)


def _route_named(
    routes: CycleRoutes, chain: Chain, who: Bools, held: frozenset[str]
) -> frozenset[str]:
    """Route requests that name their chain, or want none. Return the models in use."""
    cycle, used = routes.cycle, held
    chains: dict[Chain, list[int]] = {}
    for place in np.flatnonzero(who).tolist():
        route = _named(cycle, chain, cycle.requests.override[place], used)
        routes.add(route, _mask(len(who), [place]))
        chains.setdefault(route.chain, []).append(place)
        used = used.union(route.chain)
    for named, places in chains.items():  # caught up at any cost, since it was asked for
        those = cycle.requests.take(_mask(len(who), places))
        routes.catch_up.note(routes.catch_up.drafting(named, those))
    return used


def _named(
    cycle: Cycle, chain: Chain, override: SpeculationOverride, held: frozenset[str]
) -> Route:
    scheduler, trees = cycle.scheduler, cycle.trees
    if not isinstance(override, Speculation) or not scheduler.fit(chain, held):
        return Route((scheduler.target,))
    limits = scheduler.limits((override.depth, override.width))
    depth = limits.depth or DEFAULT_DEPTH
    # Trees of a named chain are verified whole, unless a selection was configured.
    is_open = trees.config.selection is None and scheduler.config.nodes is None
    whole = is_open or _is_whole(trees, chain)
    return Route(chain, DraftShape(depth, fitting_width(depth, limits.width or 1)), whole)


def _route_scheduled(
    routes: CycleRoutes, key: Override, who: Bools, held: frozenset[str]
) -> frozenset[str]:
    """Route requests that leave the chain to the scheduler. Return the models in use."""
    cycle, scheduler = routes.cycle, routes.cycle.scheduler
    if not cycle.view.drafts:
        routes.add(Route((scheduler.target,)), who)
        return held
    requests, models = cycle.requests.take(who), ModelNames(cycle.view.available, held)
    decision = routes.decisions.decide(key, requests, models)
    decided = decision.predicted
    later, alone = decided or _unpredicted(decision), Option(chain=(scheduler.target,))
    spare = None if len(later.chain) > 1 else _spare_chain(cycle, decision, models)
    main, waiting, drafting = _for_cycle(routes, decision, later, spare, who)
    places = np.flatnonzero(who)
    routes.waiting[places[waiting]] = True
    found: dict[tuple[int, int | None], tuple[Option, list[int]]] = {}
    options = drafting.options(main, later, alone)
    for place, option, waits in zip(places.tolist(), options, waiting.tolist(), strict=True):
        if not waits:
            cap = _deepest(cycle, int(cycle.requests.id[place]))
            found.setdefault((id(option), cap), (option, []))[1].append(place)
    for (_, cap), (option, each) in found.items():
        route = _route(cycle, key, option, decision, cap)
        routes.add(route, _at_once(routes, option, _mask(len(who), each)))
        is_cut = cap is not None and cap < option.shape.depth
        is_reshaped = len(option.chain) > 1 and (cycle.trees.selection.reshapes or is_cut)
        if (option.plain_ms or decided is not None) and not is_reshaped:
            routes.predicted[route] = option
        held = held.union(option.chain)
    return held


def _deepest(cycle: Cycle, request: int) -> int | None:
    """Return the most levels to draft for a request, by id; None: no cap."""
    cap = cycle.admission.depths.get(request)
    if cycle.depths is None:
        return cap
    levels = cycle.depths[request].levels
    return levels if cap is None else min(cap, levels)


def _at_once(routes: CycleRoutes, option: Option, who: Bools) -> Bools:
    """Return the mask [R] of the requests of a group that draft in this cycle.

    If not all may draft together, those that have waited longest do, and the others sit out.
    """
    cycle = routes.cycle
    if cycle.depths is None or len(option.chain) == 1:
        return who
    places = np.flatnonzero(who)
    together = min(cycle.depths[one].together for one in cycle.requests.id[places].tolist())
    order = places[np.argsort(-cycle.waited[places], kind="stable")]
    drafting = _mask(len(who), order[:together])
    routes.waiting |= who & ~drafting
    return drafting


def _route(
    cycle: Cycle, key: Override, option: Option, decision: ChainDecision, cap: int | None
) -> Route:
    """Return the route of an option. `cap`: the most levels to draft; None: no cap."""
    scheduler, trees = cycle.scheduler, cycle.trees
    if cap == 0:
        return Route((scheduler.target,))
    # Options have shapes of the grid: the next larger one than asked for, or else the largest.
    limits, shape = scheduler.limits(key), option.shape
    depth = limits.depth or shape.depth if shape.depth else 1
    depth = min(depth, cap or depth)
    width = fitting_width(depth, min(shape.width, limits.width or shape.width))
    drafted = DraftShape(depth, width)
    quotes = None  # allowed only if a selector drops nodes that do not pay
    if trees.selection.takes_quotations and cap is None:
        quotes = scheduler.quoter(option.chain, decision, key, cycle.view.available)
    return Route(
        option.chain,
        drafted,
        quotes is None and _is_whole(trees, option.chain),
        _form(trees, drafted) if len(option.chain) > 1 and key == SCHEDULED else None,
        quotes,
    )


def _form(trees: TreePlanner, shape: DraftShape) -> tuple[int, ...] | None:
    """Return the fixed form of trees, if there is one and it has this shape.

    It does not where requests ask for another depth or width, where only paths are drafted, or
    where admission allows fewer levels.
    """
    form = trees.branching
    fits = form is not None and (len(form), prod(form)) == (shape.depth, shape.width)
    return form if fits else None


def _is_whole(trees: TreePlanner, chain: Chain) -> bool:
    return len(chain) == 1 or trees.selection.takes_whole_trees


def _spare_chain(cycle: Cycle, decision: ChainDecision, models: ModelNames) -> Chain | None:
    """Return the best loaded chain that could draft at once for requests in need.

    Their cycle leaves no time to load a model.
    """
    for chain in (option.chain for option in decision.alternatives):
        is_ready = cycle.view.loaded.issuperset(chain[:-1])
        if is_ready and cycle.scheduler.may_use(chain, models):
            return chain
    return None


def _for_cycle(
    routes: CycleRoutes, decision: ChainDecision, main: Option, spare: Chain | None, who: Bools
) -> tuple[Option, Bools, Drafting]:
    """Choose the option for this one cycle.

    Args:
        routes: the routes so far.
        decision: the decision in use.
        main: its option.
        spare: chain that may draft where the target alone was decided on.
        who: mask [R] of the G requests of the decision.

    Returns:
        The option, the mask [G] of the requests that sit out, and those that may draft.
    """
    cycle, catch_up, requests = routes.cycle, routes.catch_up, routes.cycle.requests.take(who)
    snapshot, drafts = cycle.view.performance, len(main.chain) > 1
    none = np.zeros(len(requests), dtype=np.bool_)
    if not drafts and not (cycle.rates > 0.0).any():
        spare = None  # no request is in need
    # Drafts that were decided on pay in the long run: drafters read for them in any case.
    gain = gain_ms(decision, snapshot.machine) if drafts else None
    drafting = catch_up.drafting(spare or main.chain, requests, gain)
    alone = main if not drafts else Option(chain=(cycle.scheduler.target,))
    able = drafting.able
    if not able.any():
        if drafts:
            catch_up.note(drafting)
        return alone, none, drafting if drafts else Drafting(able=none, reads=none)
    rates, waited = cycle.rates[who][able], cycle.waited[who][able]
    grid = decision.grids.get(spare or main.chain)
    beside = _beside(routes, len(rates), drafting, drafting.able_share if drafts else 1.0)
    choice = cycle.trees.choose(snapshot, main, grid, rates, waited, beside)
    found = choice.option or alone
    if drafts or len(found.chain) > 1:
        catch_up.note(drafting, len(found.chain) > 1)
    if not drafts:
        drafting = replace(drafting, reads=none)
    if choice.option is None and (cycle.prefill.tokens or not choice.active.all()):
        found = replace(alone, plain_ms=0.0)  # its prediction is not of this cycle
    waiting = none.copy()
    waiting[able] = ~choice.active
    return found, waiting, drafting


def _beside(routes: CycleRoutes, able: int, drafting: Drafting, at_once: float) -> Beside:
    """Return the other work of the cycle.

    Args:
        routes: the routes so far.
        able: number of requests that may draft.
        drafting: the reading for them, and for others.
        at_once: share of the reading that requests which draft in this cycle need.
    """
    return Beside(
        routes.cycle.prefill.tokens,
        len(routes.cycle.requests) - able,
        routes.catch_up.ms + (1.0 - at_once) * drafting.ms,
        at_once * drafting.ms,
    )


def _foresee(routes: CycleRoutes) -> None:
    """Add predictions of the routes that have none, to learn from their outcomes too."""
    view, requests = routes.cycle.view, routes.cycle.requests
    for route, who in routes.members.items():
        if route in routes.predicted:
            continue
        count = int(who.sum())
        others = len(requests) - count
        key = route, count, others  # outcomes are learned by the number of requests
        known = view.standing.foreseen.get(key)
        if known is None or view.cycle - known[0] >= INTERVAL:
            workload = replace(workload_of(requests.take(who)), others=others)
            known = view.cycle, _predict(routes.cycle, route, workload)
        routes.foreseen[key] = known
        routes.predicted[route] = known[1]


def _predict(cycle: Cycle, route: Route, workload: Workload) -> Option:
    return cycle.scheduler.predict(
        cycle.view.performance,
        workload,
        route.chain,
        replace(route.shape, nodes=cycle.scheduler.config.nodes or 0),
        route.whole,
    )


def _unpredicted(decision: ChainDecision) -> Option:
    """Return the option of a policy that predicts nothing."""
    return Option(chain=decision.chain, shape=decision.shape)
