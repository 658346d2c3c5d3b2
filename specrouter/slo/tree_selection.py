"""Which drafted nodes the target verifies: AdaServe's selection phases and what it is compared to.

Every selection takes, of each request, the first so many nodes in falling worth. A node is never
worth more than its parent and ties go to the shallower node, so the parent comes first and what is
chosen are trees: parents need not be known here. Worth is the chance that a node is on the
verifier's walk, so a tree's worths sum to its expected accepted tokens (AdaServe, EuroSys '26,
Theorem 3.1), and the likeliest nodes are the best ones (Appendix C).

Budgets count nodes without the roots and are strict. The loops of Algorithm 2 run while B >= 0,
which spends one token more than its budget constraint (Equation 1) allows; ours run while B > 0.

Pure functions over all requests at once. How many nodes may be spent, what a cycle takes and what
worth is come from elsewhere.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specrouter.cycle import Candidates
from specrouter.request.params import MAX_TREE_TOKENS

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

Order = Literal["neediest", "easiest"]  # whose objective is served first


def needed_tokens(
    decode_ms: Floats,
    decoded_tokens: Ints,
    tpot_ms: Floats,
    cycle_ms: float,
    margin: float = 1.05,
) -> Floats:
    """[B] tokens that a request must gain in this cycle to keep its objective.

    `A(r) = (l + margin * t_spec) / t_TPOT - o` (AdaServe, section 3; the margin is its code's).
    Time lost raises A, tokens won lower it, below 0 for who is ahead. Without an objective it is
    -inf.

    Args:
        decode_ms: [B] l, since the request's first token.
        decoded_tokens: [B] o, won in that time.
        tpot_ms: [B] t_TPOT, above 0; NaN for requests without an objective.
        cycle_ms: t_spec, what the cycle will take.
    """
    needed = (decode_ms + margin * cycle_ms) / tpot_ms - decoded_tokens
    return np.where(np.isnan(tpot_ms), -np.inf, needed)


def slo_customized(
    candidates: Candidates,
    needs: Floats,
    budget_nodes: int,
    n_max: int,
    depth: int,
    root_credit: float = 1.0,
    order: Order = "neediest",
    most: int = MAX_TREE_TOKENS,
) -> Bools:
    """[B, W] objectives first, then the likeliest of all: both selection phases of Algorithm 2.

    First each request in turn takes its best nodes until its expected tokens reach
    `min(need, depth + 1)`, its tree has `n_max` nodes or the budget is spent; then the rest of the
    budget goes to the best nodes of all requests. For given needs and `n_max` a larger budget only
    adds nodes. Where `n_max` grows with the budget, only their number never falls.

    Args:
        needs: [B] of `needed_tokens`; -inf (or NaN) takes no part in the first phase.
        budget_nodes: of all requests, roots excluded; below 0 counts as 0.
        n_max: nodes of a tree in the first phase, its root included: the paper's |T| < n_max.
        depth: drafted levels; a cycle commits at most one token more.
        root_credit: tokens that a root counts for: 1 in Algorithm 2, 0 in Figure 5.
        order: "neediest" as in the paper's text, "easiest" as in its code; ties to the lower row.
        most: nodes of one tree, in both phases.
    """
    limits = np.minimum(candidates.counts, most)
    wanted = _nodes_towards(candidates, np.minimum(needs, depth + 1.0), root_credit)
    wanted = np.minimum(np.minimum(wanted, max(n_max - 1, 0)), limits)
    turns = np.argsort(needs if order == "easiest" else -needs, kind="stable")
    taken = _in_turn(wanted, turns, budget_nodes)
    return candidates.best(_filled(candidates, taken, limits, budget_nodes - int(taken.sum())))


def global_greedy(candidates: Candidates, budget_nodes: int, most: int = MAX_TREE_TOKENS) -> Bools:
    """[B, W] the best nodes of all requests: AdaServe's ablation without the objectives' phase.

    A larger budget only adds nodes. Ties go to the shallower, then to the lower row and index.
    """
    none = np.zeros_like(candidates.counts)
    limits = np.minimum(candidates.counts, most)
    return candidates.best(_filled(candidates, none, limits, budget_nodes))


def equal_greedy(candidates: Candidates, budget_nodes: int, most: int = MAX_TREE_TOKENS) -> Bools:
    """[B, W] the same number of nodes for every request, each its best: AdaServe's ablation.

    What cannot be shared evenly goes to the first rows, one node each; what a request cannot use
    is not spent. A larger budget only adds nodes.
    """
    requests = len(candidates.worth)
    share, rest = divmod(budget_nodes, max(requests, 1))
    shares = share + (np.arange(requests) < rest)
    return candidates.best(np.minimum(np.minimum(shares, candidates.counts), most))


def whole(candidates: Candidates, most: int = MAX_TREE_TOKENS) -> Bools:
    """[B, W] everything, of a larger tree its `most` best nodes: static trees and sequences."""
    return candidates.best(np.minimum(candidates.counts, most))


def _nodes_towards(candidates: Candidates, goals: Floats, root_credit: float) -> Ints:
    """[B] how many of a row's best nodes it takes until `goals[i]` tokens are expected."""
    root = np.full((len(goals), 1), root_credit)
    reached = np.cumsum(np.concatenate((root, candidates.gains), axis=1), axis=1)
    nodes: Ints = (reached < goals[:, None]).sum(axis=1)
    return nodes


def _in_turn(wanted: Ints, turns: Ints, budget_nodes: int) -> Ints:
    """[B] what each row gets of the budget when rows take what they want in turn."""
    queue = wanted[turns]
    before = np.cumsum(queue) - queue
    taken = np.empty_like(wanted)
    taken[turns] = np.minimum(np.maximum(budget_nodes - before, 0), queue)
    return taken


def _filled(candidates: Candidates, taken: Ints, limits: Ints, left: int) -> Ints:
    """[B] nodes of each row once the `left` best of all rows are added to those taken."""
    place = np.arange(candidates.worth.shape[1])
    free = np.flatnonzero((place >= taken[:, None]) & (place < limits[:, None]))
    if left >= len(free):
        return limits
    keys = (candidates.levels.ravel()[free], -candidates.gains.ravel()[free])
    best = free[np.lexsort(keys)[: max(left, 0)]]
    return taken + np.bincount(best // len(place), minlength=len(taken))
