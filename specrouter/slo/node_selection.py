"""NodeSelection: the interface of a policy for nodes, and the policies of SpecRouter.

A selection picks, from the trees of a cycle, the nodes that the target verifies. To write one,
subclass `NodeSelection`, override `selector`, and name an instance of it in a configuration:
`trees.selection: my_package.my_module:MY_SELECTION`.

Contract: pure. The selector that is returned is valid for one cycle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from functools import partial

import numpy as np
from numpy.typing import NDArray

from specrouter.cycle import Candidates, DraftShape, TreeSelector
from specrouter.profile.time_curve import ForwardTimes
from specrouter.slo.tree_selection import CycleCost, global_greedy, most_valuable, whole

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False, kw_only=True)
class Progress:
    """The progress and the objectives of the decoding requests, [B] each."""

    rows: Ints  # ascending
    decode_ms: Floats  # since the first token
    decoded: Ints  # tokens after the first
    waited: Ints  # cycles in a row that they have sat out
    tpot_ms: Floats  # NaN without an objective
    rates: Floats  # tokens per ms that are needed, see `needed_rates`

    def at(self, rows: Ints) -> Ints:
        return np.searchsorted(self.rows, rows)

    def of(self, rows: Ints) -> Progress:
        """Return the progress of some of the requests; `rows` ascending."""
        if len(rows) == len(self.rows):
            return self
        at = self.at(rows)
        return Progress(**{one.name: getattr(self, one.name)[at] for one in fields(self)})


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
    def selector(self, progress: Progress, cost: CycleCost, budget_nodes: int) -> TreeSelector:
        """Return the function that picks the nodes of one cycle.

        Args:
            progress: progress of the decoding requests.
            cost: milliseconds of the cycle, by verified nodes.
            budget_nodes: nodes of all requests together, without their roots.
        """

    def shape(
        self, decided: DraftShape, target: ForwardTimes, requests: int, budget_tokens: int | None
    ) -> DraftShape:
        """Return the shape of the drafts of so many requests, given the chain policy's."""
        return decided


class _Goodput(NodeSelection):
    """The selection that brings most tokens in time, objectives first; see `most_valuable`."""

    takes_quotations = plans_cycles = True

    def selector(self, progress: Progress, cost: CycleCost, budget_nodes: int) -> TreeSelector:
        return partial(self._select, progress, cost)

    @staticmethod
    def _select(
        progress: Progress, cost: CycleCost, rows: Ints, candidates: Candidates, aside: int
    ) -> Bools:
        return most_valuable(candidates, progress.rates[progress.at(rows)], cost.beside(aside))


class _GlobalGreedy(NodeSelection):
    """The selection of the likeliest nodes of all requests, regardless of objectives."""

    def selector(self, progress: Progress, cost: CycleCost, budget_nodes: int) -> TreeSelector:
        return lambda rows, candidates, aside: global_greedy(
            candidates, max(0, budget_nodes - aside)
        )


class Whole(NodeSelection):
    """The selection of all nodes."""

    takes_whole_trees = True

    def selector(self, progress: Progress, cost: CycleCost, budget_nodes: int) -> TreeSelector:
        return lambda rows, candidates, aside: whole(candidates)


GOODPUT = _Goodput()
GLOBAL_GREEDY = _GlobalGreedy()
WHOLE = Whole()
