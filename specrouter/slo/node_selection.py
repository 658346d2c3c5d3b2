"""NodeSelection: the interface of a policy for nodes, and the policies of SpecRouter.

A selection picks, from the trees of a cycle, the nodes that the target verifies. To write one,
subclass `NodeSelection`, override `selector`, and name an instance of it in a configuration:
`trees.selection: my_package.my_module:MY_SELECTION`.

Contract: pure. The selector that is returned is valid for one cycle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial

import numpy as np
from numpy.typing import NDArray

from specrouter.cycle import Candidates, DraftShape, TreeSelector
from specrouter.profile.time_curve import TimeCurve
from specrouter.slo.tree_selection import CycleCost, global_greedy, most_valuable, whole
from specrouter.slo.value import needed_rates
from specrouter.view import RequestTable

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def rates_of(requests: RequestTable) -> Floats:
    """Return the tokens per millisecond that each request needs; see `needed_rates`."""
    # A declined request has no objective that can still be attained.
    tpot_ms = np.where(requests.declined, np.nan, requests.tpot_ms)
    return needed_rates(requests.decode_ms, requests.decoded, requests.remaining, tpot_ms)


class NodeSelection(ABC):
    """A policy that selects the nodes to verify.

    Attributes:
        takes_whole_trees: all drafted nodes are verified, so drafts are no larger than what pays.
        takes_quotations: text drafters may lengthen drafts, since nodes that do not pay are not
            verified.
        plans_cycles: the requests that draft in a cycle, and their trees, are chosen by what they
            still need for their objectives.
        branching: the branches of every node, level by level, where trees have a fixed form.
        reshapes: `shape` is not the chain policy's, so that policy's prediction does not hold.
    """

    takes_whole_trees: bool = False
    takes_quotations: bool = False
    plans_cycles: bool = False
    branching: tuple[int, ...] | None = None
    reshapes: bool = False

    @abstractmethod
    def selector(self, requests: RequestTable, cost: CycleCost, budget_nodes: int) -> TreeSelector:
        """Return the function that picks the nodes of one cycle.

        Args:
            requests: the decoding requests, by row.
            cost: milliseconds of the cycle, by verified nodes.
            budget_nodes: nodes of all requests together, without their roots.
        """

    def shape(
        self, decided: DraftShape, target: TimeCurve, requests: int, budget_tokens: int | None
    ) -> DraftShape:
        """Return the shape of the drafts of so many requests, given the chain policy's."""
        return decided


class _Goodput(NodeSelection):
    """The selection that brings most tokens in time, objectives first; see `most_valuable`."""

    takes_quotations = plans_cycles = True

    def selector(self, requests: RequestTable, cost: CycleCost, budget_nodes: int) -> TreeSelector:
        return partial(self._select, requests, cost)

    @staticmethod
    def _select(
        requests: RequestTable, cost: CycleCost, rows: Ints, candidates: Candidates, aside: int
    ) -> Bools:
        rates = rates_of(requests)[requests.at(rows)]
        return most_valuable(candidates, rates, cost.beside(aside))


class _GlobalGreedy(NodeSelection):
    """The selection of the likeliest nodes of all requests, regardless of objectives."""

    def selector(self, requests: RequestTable, cost: CycleCost, budget_nodes: int) -> TreeSelector:
        return lambda rows, candidates, aside: global_greedy(
            candidates, max(0, budget_nodes - aside)
        )


class Whole(NodeSelection):
    """The selection of all nodes."""

    takes_whole_trees = True

    def selector(self, requests: RequestTable, cost: CycleCost, budget_nodes: int) -> TreeSelector:
        return lambda rows, candidates, aside: whole(candidates)


GOODPUT = _Goodput()
GLOBAL_GREEDY = _GlobalGreedy()
WHOLE = Whole()
