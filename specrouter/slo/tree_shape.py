"""How deep and wide trees are drafted, by the number of active requests: AdaServe's rules.

Many requests leave each a small part of the verifier's budget, so deep and wide trees would be
drafted only to be thrown away. Pure arithmetic; which tokens are verified is decided later.
"""

from specrouter.config import TreesConfig
from specrouter.request.params import MAX_TREE_TOKENS

# SpecInfer's static tree: branches of every node, level by level. 20 nodes in three paths.
SPECINFER_TREE: tuple[int, ...] = (1, 1, 3, 1, 1, 1, 1, 1)


def adaserve_shape(requests: int, budget_tokens: int, bounds: TreesConfig) -> tuple[int, int]:
    """(depth, width) for `requests` >= 1 active ones: Equations 8 and 9 of EuroSys '26.

    `d = clip(Dmax, Dmin, floor(B1 / (n + c1)) - 1)` and `w = clip(Wmax, 1, floor(B2 / n) + c2)`:
    a path with its root is no larger than a request's mean share of the verifier's budget B1,
    `budget_tokens`; B2 is the drafter's, the same where it is left out.
    """
    assert requests >= 1
    depth = budget_tokens // (requests + bounds.c1) - 1
    width = (bounds.drafter_tokens or budget_tokens) // requests + bounds.c2
    return (
        max(bounds.min_depth, min(bounds.max_depth, depth)),
        max(1, min(bounds.max_width, width)),
    )


def fitting_width(depth: int, width: int) -> int:
    """The width, or the most with which a tree of this depth stays within MAX_TREE_TOKENS."""
    return max(1, min(width, MAX_TREE_TOKENS // depth))
