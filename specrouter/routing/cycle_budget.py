"""The budget that admission leaves to the trees of one cycle (`Admission`).

Admission plans a cycle's prompts and tokens together, and leaves a number of nodes and a time to
drafts. All routes of a cycle are cut alike: to the deepest trees that fit, first at their width,
then at width 1. If none fit, the target decodes alone, which is always allowed.

Pure.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from specrouter.cycle import Candidates, TreeSelector
from specrouter.routing.route import Route
from specrouter.slo.admission import Admission
from specrouter.slo.tree_selection import Bools, CycleCost, Ints, global_greedy

Cut = dict[Route, Route]  # the route that replaces each one


def cut_to_budget(
    admission: Admission,
    counts: Mapping[Route, int],
    whole_nodes: Callable[[Route], int],
    ms: Callable[[Sequence[tuple[Route, int]]], float],
) -> Cut:
    """Return the routes of the cycle after cutting them to the budget.

    Args:
        admission: the budget.
        counts: number of requests of each route.
        whole_nodes: nodes of one request's tree, where all of it is verified; 0 where a selector
            picks.
        ms: predicted time of a cycle, from each route's number of requests.
    """
    most, most_ms = admission.budget_nodes, admission.budget_ms
    for cut in _cuts(list(counts)):
        shares = [(cut[route], count) for route, count in counts.items()]
        nodes = sum(count * whole_nodes(route) for route, count in shares)
        if most is not None and nodes > most:
            continue
        is_alone = all(len(route.chain) == 1 for route in cut.values())
        if most_ms is None or is_alone or ms(shares) <= most_ms:
            return cut
    raise AssertionError("the target alone verifies no node")


def nodes_within(admission: Admission, cost: CycleCost, wanted: int) -> int:
    """Return the wanted nodes, or the most that may be verified in a cycle of this cost."""
    nodes, ms = admission.budget_nodes, admission.budget_ms
    most = wanted if nodes is None else min(wanted, nodes)
    if ms is None:
        return most
    fit = int(np.searchsorted(cost.ms + cost.prompt_ms, ms, side="right")) - 1
    return max(0, min(most, fit))


def bounded(selector: TreeSelector, most: int) -> TreeSelector:
    """Return a selector that keeps only the likeliest `most` nodes of the given one's choice.

    The nodes of whole trees count as well.
    """

    def select(rows: Ints, candidates: Candidates, aside: int) -> Bools:
        chosen, left = selector(rows, candidates, aside), max(0, most - aside)
        if int(chosen.sum()) <= left:
            return chosen
        worth = np.where(chosen, candidates.worth, 0.0)
        return global_greedy(replace(candidates, worth=worth), left)

    return select


def _cuts(routes: Sequence[Route]) -> Iterator[Cut]:
    """Yield the routes as they are, then with ever smaller trees, and last without drafts."""
    yield {route: route for route in routes}
    drafting = [route for route in routes if len(route.chain) > 1]
    deepest = max((route.shape.depth for route in drafting), default=0)
    widest = max((route.shape.width for route in drafting), default=1)
    for depth in range(deepest, 0, -1):
        for width in (widest, 1) if widest > 1 else (1,):
            yield {route: _within(route, depth, width) for route in routes}
    yield {route: Route(route.chain[-1:]) for route in routes}


def _within(route: Route, depth: int, width: int) -> Route:
    shape = route.shape
    if len(route.chain) == 1 or (shape.depth <= depth and shape.width <= width):
        return route
    cut = replace(shape, depth=min(shape.depth, depth), width=min(shape.width, width))
    return route._replace(shape=cut, branching=None)
