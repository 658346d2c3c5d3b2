"""How deep and wide trees are drafted, by the number of active requests: AdaServe's rules.

Many requests leave each a small part of the verifier's budget, so deep and wide trees would be
drafted only to be thrown away. Pure arithmetic; which tokens are verified is decided later.
"""

from dataclasses import dataclass

# SpecInfer's static tree: branches of every node, level by level. 20 nodes in three paths.
SPECINFER_TREE: tuple[int, ...] = (1, 1, 3, 1, 1, 1, 1, 1)


@dataclass(frozen=True)
class ShapeBounds:
    """The constants of AdaServe's Equations 8 and 9 (EuroSys '26, section 5.2).

    Attributes:
        verifier_tokens: B1, of all requests, that the target should read in a cycle.
        drafter_tokens: B2, of all requests, that the drafter should read in a step.
        max_depth, min_depth: Dmax and Dmin.
        max_width: Wmax.
        c1, c2: found by grid search, not published. c1 is at least 0.

    Raises:
        ValueError: bounds that leave no shape; names the field.
    """

    verifier_tokens: int
    drafter_tokens: int
    max_depth: int = 8
    min_depth: int = 1
    max_width: int = 3
    c1: int = 0
    c2: int = 0

    def __post_init__(self) -> None:
        for name in ("verifier_tokens", "drafter_tokens", "min_depth", "max_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1")
        if self.max_depth < self.min_depth:
            raise ValueError(f"max_depth: must be at least min_depth, {self.min_depth}")
        if self.c1 < 0:
            raise ValueError("c1: must be at least 0")


def adaserve_shape(requests: int, bounds: ShapeBounds) -> tuple[int, int]:
    """(depth, width) for `requests` >= 1 active ones: Equations 8 and 9 of EuroSys '26.

    `d = clip(Dmax, Dmin, floor(B1 / (n + c1)) - 1)` and `w = clip(Wmax, 1, floor(B2 / n) + c2)`:
    a path with its root is no larger than a request's mean share of the verifier's budget.
    """
    assert requests >= 1
    depth = bounds.verifier_tokens // (requests + bounds.c1) - 1
    width = bounds.drafter_tokens // requests + bounds.c2
    return (
        max(bounds.min_depth, min(bounds.max_depth, depth)),
        max(1, min(bounds.max_width, width)),
    )
