"""RooflineTime: times of batches as SLOs-Serve has them, of published coefficients.

Source: SLOs-Serve (arXiv 2504.08784), section 3.1.1.
"""

import math
from dataclasses import dataclass

from specrouter.profile.batch_time import MOST_TOKENS, most_within

Term = tuple[float, float, float]  # k1, k2, b: ms per token, per drafting step, and at least


@dataclass(frozen=True)
class RooflineTime:
    """`max over terms of (k1 * tokens + k2 * steps + b)`; coefficients are at least 0."""

    terms: tuple[Term, ...]

    def __post_init__(self) -> None:
        assert self.terms, "a machine without terms takes no time"
        assert all(each >= 0.0 for term in self.terms for each in term), "times do not fall"

    def ms(self, tokens: float, steps: int = 0) -> float:
        return max(k1 * tokens + k2 * steps + b for k1, k2, b in self.terms)

    def tokens_within(self, ms: float, steps: int = 0) -> int:
        if self.ms(1, steps) > ms:
            return 0
        left = [(max(0.0, ms - k2 * steps - b), k1) for k1, k2, b in self.terms]
        most = min((spare / k1 for spare, k1 in left if k1 > 0.0), default=math.inf)
        return most_within(self, min(most, MOST_TOKENS), ms, steps)

    def scaled(self, factor: float) -> "RooflineTime":
        """With all times `factor` times as long."""
        return RooflineTime(
            tuple((k1 * factor, k2 * factor, b * factor) for k1, k2, b in self.terms)
        )
