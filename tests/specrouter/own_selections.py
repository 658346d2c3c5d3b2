"""Selections of nodes of one's own, each with one attribute that the built-in ones do not have."""

from specrouter.cycle import DraftShape, TreeSelector
from specrouter.profile.time_curve import TimeCurve
from specrouter.slo.node_selection import GOODPUT, NodeSelection, Whole
from specrouter.slo.tree_selection import CycleCost
from specrouter.view import RequestTable


class Unplanned(NodeSelection):
    """Picks as `goodput` does, from the drafts that the chain policy decided on."""

    def selector(self, requests: RequestTable, cost: CycleCost, budget_nodes: int) -> TreeSelector:
        return GOODPUT.selector(requests, cost, budget_nodes)


class Formed(Whole):
    """Trees of a root with two branches of two nodes."""

    branching = (2, 1)


class Reshaping(Unplanned):
    """As deep as there are requests, or as the budget of tokens says, at most 9; three wide."""

    reshapes = True

    def shape(
        self, decided: DraftShape, target: TimeCurve, requests: int, budget_tokens: int | None
    ) -> DraftShape:
        return DraftShape(min(9, budget_tokens or requests), 3)


UNPLANNED, FORMED, RESHAPING = Unplanned(), Formed(), Reshaping()
