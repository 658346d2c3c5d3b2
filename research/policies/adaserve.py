"""AdaServe's trees: how large they are, and which of their nodes are verified.

Many requests leave each a small part of the verifier's budget, so deep and wide trees would be
drafted only to be thrown away: depth and width follow from the number of requests (Equations 8 and
9). Of the drafted nodes each request takes in turn what its objective needs, then the rest of the
budget goes to the likeliest nodes of all (Algorithm 2). `equal_greedy` and SpecInfer's tree are
what AdaServe is compared with.

Budgets count nodes without the roots and are strict. The loops of Algorithm 2 run while B >= 0,
which spends one token more than its budget constraint (Equation 1) allows; ours run while B > 0.

Source: AdaServe (EuroSys '26), sections 3, 4.3, 5.2 and 6.3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specrouter.cycle import Candidates, DraftShape, TreeSelector
from specrouter.profile.time_curve import TimeCurve
from specrouter.request.params import MAX_DEPTH, MAX_TREE_TOKENS, MAX_WIDTH
from specrouter.slo.node_selection import NodeSelection, Whole
from specrouter.slo.tree_selection import (
    CycleCost,
    in_turn,
    nodes_towards,
    running_sums,
    topped_up,
)
from specrouter.view import RequestTable

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

Order = Literal["neediest", "easiest"]  # whose objective is served first

# SpecInfer's static tree: branches of every node, level by level. 20 nodes in three paths.
SPECINFER_TREE: tuple[int, ...] = (1, 1, 3, 1, 1, 1, 1, 1)


@dataclass(frozen=True, kw_only=True)
class AdaServeTrees(NodeSelection):
    """Trees of Equations 8 and 9. A subclass says which nodes are verified.

    Attributes:
        max_depth, min_depth, max_width: bounds of the equations.
        drafter_tokens: B2 of Equation 9, what a drafter reads in a step; None: the budget.
        c1, c2: constants of the equations.

    Raises:
        ValueError: a bound that no tree can have.
    """

    max_depth: int = 8
    min_depth: int = 1
    max_width: int = 3
    drafter_tokens: int | None = None
    c1: int = 0
    c2: int = 0
    reshapes: bool = True  # False: the chain policy's own shapes

    def __post_init__(self) -> None:
        if not 1 <= self.min_depth <= self.max_depth <= MAX_DEPTH:
            raise ValueError(f"min_depth and max_depth must be in order, from 1 to {MAX_DEPTH}")
        if not 1 <= self.max_width <= MAX_WIDTH:
            raise ValueError(f"max_width must be from 1 to {MAX_WIDTH}")
        if self.max_depth * self.max_width > MAX_TREE_TOKENS:
            raise ValueError(f"max_depth times max_width must be at most {MAX_TREE_TOKENS}")
        if self.drafter_tokens is not None and self.drafter_tokens < 1:
            raise ValueError("drafter_tokens must be at least 1")

    def shape(
        self, decided: DraftShape, target: TimeCurve, requests: int, budget_tokens: int | None
    ) -> DraftShape:
        """Without a configured budget, it is what a pass reads in twice the time of the roots
        alone: where reading more tokens takes as long as reading the weights."""
        if budget_tokens is None:
            roof = int(min(target.tokens_within(2.0 * target.at(requests)), 1e6))
            budget_tokens = max(requests, roof)
        return DraftShape(*self.depth_and_width(requests, budget_tokens))

    def depth_and_width(self, requests: int, budget_tokens: int) -> tuple[int, int]:
        """For `requests` >= 1 active ones: Equations 8 and 9 of EuroSys '26.

        `d = clip(Dmax, Dmin, floor(B1 / (n + c1)) - 1)` and `w = clip(Wmax, 1, floor(B2 / n) +
        c2)`: a path with its root is no larger than a request's mean share of the verifier's budget
        B1, `budget_tokens`; B2 is the drafter's, the same where it is left out.
        """
        assert requests >= 1
        depth = budget_tokens // (requests + self.c1) - 1
        width = (self.drafter_tokens or budget_tokens) // requests + self.c2
        return (
            max(self.min_depth, min(self.max_depth, depth)),
            max(1, min(self.max_width, width)),
        )


@dataclass(frozen=True, kw_only=True)
class AdaServe(AdaServeTrees):
    """Algorithm 2 under a budget.

    Attributes:
        fills: the second phase; False: AdaServe's ablation, objectives only.
        n_max_share: nodes that a request may get towards its objective, times its equal share.
        latency_margin: on the foreseen time of a cycle.
        root_credit: accepted tokens that a tree's root stands for.
        order: who is served first when a budget does not serve all.
    """

    fills: bool = True
    n_max_share: float = 1.2
    latency_margin: float = 1.05
    root_credit: float = 1.0
    order: Order = "neediest"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.n_max_share < math.inf:  # NaN is not
            raise ValueError("n_max_share must be above 0")
        if not 1.0 <= self.latency_margin < math.inf:
            raise ValueError("latency_margin must be at least 1")
        if not 0.0 <= self.root_credit <= 1.0:
            raise ValueError("root_credit must be from 0 to 1")

    def selector(self, requests: RequestTable, cost: CycleCost, budget_nodes: int) -> TreeSelector:
        return partial(self._select, requests, budget_nodes, cost.whole_ms(budget_nodes))

    def _select(
        self,
        requests: RequestTable,
        budget_nodes: int,
        cycle_ms: float,
        rows: Ints,
        candidates: Candidates,
        aside: int,
    ) -> Bools:
        those = requests.take(requests.at(rows))
        needs = needed_tokens(
            those.decode_ms,
            those.decoded,
            np.where(those.declined, np.nan, those.tpot_ms),
            cycle_ms,
            self.latency_margin,
        )
        share = (len(rows) + budget_nodes) / len(rows)  # a tree's root counts in it
        return slo_customized(
            candidates,
            needs,
            max(0, budget_nodes - aside),
            round(self.n_max_share * share),
            int(candidates.depths.max(initial=0)),
            self.root_credit,
            self.order,
            fills=self.fills,
        )


@dataclass(frozen=True, kw_only=True)
class EqualGreedy(AdaServeTrees):
    """The same number of nodes for each request: AdaServe's ablation."""

    def selector(self, requests: RequestTable, cost: CycleCost, budget_nodes: int) -> TreeSelector:
        return lambda rows, candidates, aside: equal_greedy(
            candidates, max(0, budget_nodes - aside)
        )


class SpecInfer(Whole):
    """SpecInfer's static tree, verified whole."""

    branching = SPECINFER_TREE


ADASERVE = AdaServe()
ADASERVE_SLO_PHASE = AdaServe(fills=False)
EQUAL_GREEDY = EqualGreedy()
SPECINFER = SpecInfer()


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
    fills: bool = True,
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
        fills: False leaves the second phase out: AdaServe's ablation.
    """
    limits = np.minimum(candidates.counts, MAX_TREE_TOKENS)
    sums = running_sums(candidates.gains, root_credit)
    wanted = nodes_towards(sums, np.minimum(needs, depth + 1.0)[None])
    wanted = np.minimum(np.minimum(wanted, max(n_max - 1, 0)), limits)
    turns = np.argsort(needs if order == "easiest" else -needs, kind="stable")
    budgets = np.array([budget_nodes])
    taken = in_turn(wanted, turns, budgets)
    return candidates.best((topped_up(candidates, taken, budgets) if fills else taken)[0])


def equal_greedy(candidates: Candidates, budget_nodes: int) -> Bools:
    """[B, W] the same number of nodes for every request, each its best: AdaServe's ablation.

    What cannot be shared evenly goes to the first rows, one node each; what a request cannot use
    is not spent. A larger budget only adds nodes.
    """
    requests = len(candidates.worth)
    share, rest = divmod(budget_nodes, max(requests, 1))
    shares = share + (np.arange(requests) < rest)
    return candidates.best(np.minimum(np.minimum(shares, candidates.counts), MAX_TREE_TOKENS))
