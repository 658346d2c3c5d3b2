"""BatchTime: how long a batch of tokens takes, and how many tokens fit in a time.

Contract: all that admission knows of a machine. A batch is its tokens, of prompts and of decoding
requests together, and the drafting steps before it. Neither more tokens nor more steps take less
time, and `tokens_within` is the inverse of `ms`: with the most tokens that fit, one more does not.

`CurveTime` is over the curves measured here.
Source: SLOs-Serve (arXiv 2504.08784), section 3.1.1.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Protocol

from specrouter.profile.time_curve import ForwardTimes

MOST_TOKENS = 1 << 20  # of a batch; more are as many


class BatchTime(Protocol):
    def ms(self, tokens: float, steps: int = 0) -> float:
        """Of a batch of so many tokens, drafted in so many steps; 0 where nobody drafts."""

    def tokens_within(self, ms: float, steps: int = 0) -> int:
        """The most tokens whose batch takes at most `ms`, at most `MOST_TOKENS`; 0 where even a
        batch of one takes longer. The paper's time2bs."""


@dataclass(frozen=True)
class CurveTime:
    """Of measured curves: the target's pass, the drafting steps before it, and the work around.

    Attributes:
        target: ms of a pass by its tokens.
        step_ms: of a drafting step.
        around_ms: of a cycle, whatever is in it.
        slots: KV slots that a token attends to, in the mean.
        most: tokens of a batch at most; `ms` of more is that of several.
    """

    target: ForwardTimes
    step_ms: float = 0.0
    around_ms: float = 0.0
    slots: float = 0.0
    most: int = MOST_TOKENS

    def ms(self, tokens: float, steps: int = 0) -> float:
        full = max(0, math.ceil(tokens / self.most) - 1)
        found = self._batch_ms(tokens - full * self.most, steps)
        return found + full * self._batch_ms(self.most, steps) if full else found

    def _batch_ms(self, tokens: float, steps: int) -> float:
        return self.around_ms + self.step_ms * steps + self.target.at(tokens, self.slots * tokens)

    def tokens_within(self, ms: float, steps: int = 0) -> int:
        left_ms = ms - self.around_ms - self.step_ms * steps
        most = self.target.tokens_within(left_ms, slots=self.slots)
        if most >= self.most and self.ms(self.most, steps) <= ms:
            return self.most
        return min(self.most, most_within(self, min(most, self.most), ms, steps))


@dataclass(frozen=True)
class Reserved:
    """Another machine's times, where so many tokens of every batch are taken already, and drafted
    in so many steps."""

    times: BatchTime
    tokens: int
    steps: int = 0

    def ms(self, tokens: float, steps: int = 0) -> float:
        return self.times.ms(tokens + self.tokens, max(steps, self.steps))

    def tokens_within(self, ms: float, steps: int = 0) -> int:
        most = self.times.tokens_within(ms, max(steps, self.steps))
        return max(0, most - self.tokens)


def most_within(times: BatchTime, tokens: float, ms: float, steps: int) -> int:
    """The most tokens that fit, near `tokens`: rounding may have led one astray, and far where a
    token takes less than the rest of the batch can be told from."""
    found = math.floor(tokens)
    for near in (found, found + 1, found - 1):
        fits = not near or times.ms(near, steps) <= ms
        if near >= 0 and fits and (near == MOST_TOKENS or times.ms(near + 1, steps) > ms):
            return near
    sizes = range(1, MOST_TOKENS + 1)
    return bisect_right(sizes, ms, key=lambda size: times.ms(size, steps))
