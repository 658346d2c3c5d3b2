"""The choice of the nodes that the target verifies: by their worth, under one budget.

Every selection takes the first nodes of each request in the order of falling worth. A node is never
worth more than its parent and ties go to the shallower node, so the parent comes first and the
choice is a tree: parents need not be known here. Worth is the chance that a node is on the
verifier's walk, so a tree's worths sum to its expected accepted tokens (AdaServe, EuroSys '26,
Theorem 3.1), and the likeliest nodes are the best ones (Appendix C).

Budgets count nodes without the roots and are strict. No tree has more than MAX_TREE_TOKENS.

Pure functions over all requests at once. The budget, the cost of a cycle and the worths are inputs.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specrouter.cycle import Candidates
from specrouter.request.params import MAX_TREE_TOKENS
from specrouter.slo.value import attainable, value

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_BUDGETS = 24  # budgets that are compared


@dataclass(frozen=True, eq=False)
class CycleCost:
    """Milliseconds of a cycle by the draft nodes that the target verifies, [K + 1].

    Attributes:
        ms: time without the prompts that are read in it.
        prompt_ms: time that these add.
        drafting_ms: part of `ms` that a cycle without drafts would not take.
        filled: [K + 1] the most nodes that the same pass has room for, where passes are filled up
            to fixed sizes; None elsewhere.
    """

    ms: Floats
    prompt_ms: float = 0.0
    drafting_ms: float = 0.0
    filled: Ints | None = None

    @property
    def plain_ms(self) -> float:
        return float(self.ms[0]) - self.drafting_ms

    def whole_ms(self, nodes: int) -> float:
        """Return the time of the cycle with its prompts."""
        return float(self.ms[min(nodes, len(self.ms) - 1)]) + self.prompt_ms

    def filling(self, nodes: int) -> int:
        """Return the number of nodes that fills the pass of so many nodes."""
        if self.filled is None:
            return nodes
        return max(nodes, int(self.filled[min(nodes, len(self.filled) - 1)]))

    def beside(self, aside: int) -> "CycleCost":
        """Return the cost by further nodes, where `aside` nodes are verified in any case."""
        aside = min(aside, len(self.ms) - 2)
        filled = None if self.filled is None else self.filled[aside:] - aside
        return replace(self, ms=self.ms[aside:], filled=filled)


def most_valuable(candidates: Candidates, rates: Floats, cost: CycleCost) -> Bools:
    """Return the nodes [B, W] of both phases, under the budget of most value: the default.

    The first phase serves the objectives with the least needs first, so that most requests are on
    time if no budget serves all. A request that could not attain its objective even with its whole
    tree (`value.attainable`) waits for the second phase. Of all budgets the one of the highest
    `value` is taken. Requests without an objective do not pay for the others' nodes: a budget with
    which they gain less per millisecond than without drafts is not taken, unless all are such.

    Args:
        candidates: the drafted nodes.
        rates: [B] of `needed_rates`.
        cost: milliseconds of the cycle, by verified nodes.
    """
    batch, free = len(rates), rates == 0.0
    sums = running_sums(candidates.gains[:, :MAX_TREE_TOKENS])
    limits = np.minimum(candidates.counts, MAX_TREE_TOKENS)
    budgets = _budgets(min(len(cost.ms) - 1, int(limits.sum())), cost.filled)
    ms = cost.ms[budgets][:, None]  # [G, 1]
    helped = attainable(rates, sums[:, -1] / ms)
    taken = np.zeros(helped.shape, dtype=np.int64)
    if not free.all():
        wanted = np.minimum(nodes_towards(sums, helped * ms), limits)
        taken = in_turn(wanted, np.argsort(rates, kind="stable"), budgets)
    taken = topped_up(candidates, taken, budgets)
    tokens = sums[np.arange(batch), taken]
    total = value(tokens, helped, ms).sum(axis=1)
    if free.any() and not free.all():
        speed = tokens[:, free].sum(axis=1) / ms[:, 0]
        is_slower = speed < (1.0 - 1e-9) * free.sum() / cost.plain_ms
        total = speed if is_slower.all() else np.where(is_slower, -np.inf, total)
    return candidates.best(taken[int(np.argmax(total))])


def global_greedy(candidates: Candidates, budget_nodes: int) -> Bools:
    """Return the best nodes [B, W] of all requests: AdaServe's ablation without objectives.

    A larger budget only adds nodes. Ties go to the shallower, then to the lower row and index.
    """
    none = np.zeros((1, len(candidates.counts)), dtype=np.int64)
    return candidates.best(topped_up(candidates, none, np.array([budget_nodes]))[0])


def whole(candidates: Candidates) -> Bools:
    """Return all nodes [B, W], or the best of too large a tree: static trees and sequences."""
    return candidates.best(np.minimum(candidates.counts, MAX_TREE_TOKENS))


def running_sums(gains: Floats, root_credit: float = 1.0) -> Floats:
    """Return the expected tokens [B, M + 1] of a row's best nodes, for 0 to M of them."""
    root = np.full((len(gains), 1), root_credit)
    return np.cumsum(np.concatenate((root, gains), axis=1), axis=1)


def nodes_towards(sums: Floats, goals: Floats) -> Ints:
    """Return how many [G, B] of a row's best nodes bring `goals` [G, B] expected tokens."""
    nodes: Ints = (sums < goals[:, :, None]).sum(axis=2)
    return nodes


def in_turn(wanted: Ints, turns: Ints, budgets: Ints) -> Ints:
    """Return each row's part [G, B] of each budget when rows take what they want [G, B] in turn."""
    queue = wanted[:, turns]
    before = np.cumsum(queue, axis=1) - queue
    taken = np.empty_like(queue)
    taken[:, turns] = np.clip(budgets[:, None] - before, 0, queue)
    return taken


def topped_up(candidates: Candidates, taken: Ints, budgets: Ints) -> Ints:
    """Return each row's nodes [G, B] once the rest of each budget goes to the best of all rows."""
    gains = candidates.gains[:, :MAX_TREE_TOKENS]
    levels = candidates.levels[:, :MAX_TREE_TOKENS]
    most_nodes = max(0, int(budgets.max()))
    best = np.lexsort((levels.ravel(), -gains.ravel()))[:most_nodes]
    best = best[gains.ravel()[best] > 0.0]
    row, place = np.divmod(best, max(1, gains.shape[1]))
    free = place >= taken[:, row]  # [G, N]
    free &= np.cumsum(free, axis=1) <= (budgets - taken.sum(axis=1))[:, None]
    budget, node = np.nonzero(free)
    further = np.bincount(budget * len(gains) + row[node], minlength=taken.size)
    return taken + further.reshape(taken.shape)


def _budgets(most: int, filled: Ints | None = None) -> Ints:
    """Return the budgets [G] to compare, ascending from 0 to `most`; all of them if there are few.

    With `filled` (see `CycleCost`), each but the first and the last fills a pass.
    """
    if filled is not None:
        edges = np.minimum(filled[: most + 1], most)
        places = np.arange(most + 1)
        if len(np.unique(edges)) > _BUDGETS:
            places = _budgets(most)
        return np.unique(np.concatenate(([0], edges[places])))
    if most < _BUDGETS:
        return np.arange(most + 1)
    steps = np.rint(np.linspace(0.0, 1.0, _BUDGETS) ** 1.5 * most)
    budgets: Ints = np.unique(steps).astype(np.int64)
    return budgets
