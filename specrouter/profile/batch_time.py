"""BatchTime: the time of a batch of tokens, and the tokens that fit in a time.

Contract: it is all that admission knows of a machine. A batch is its tokens, of prompts and of
decoding requests together, and the drafting steps before it. More tokens or more steps never take
less time, and `tokens_within` is the inverse of `ms`: one token more than it returns does not fit.

`CurveTime` uses the measured curves.
Source: SLOs-Serve (arXiv 2504.08784), section 3.1.1.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Protocol

from specrouter.profile.time_curve import TimeCurve

MOST_TOKENS = 1 << 20  # of a batch; the upper bound of `tokens_within`


class BatchTime(Protocol):
    def ms(self, tokens: float, steps: int = 0) -> float:
        """Return the time of a batch of so many tokens, drafted in so many steps; 0: no drafts."""

    def tokens_within(self, ms: float, steps: int = 0) -> int:
        """Return the most tokens whose batch takes at most `ms`, up to `MOST_TOKENS`.

        0 if a batch of one takes longer. The paper's time2bs.
        """


@dataclass(frozen=True)
class CurveTime:
    """The times by measured curves: the target's pass, the drafting steps, and the other work.

    Attributes:
        target: ms of a pass by its tokens.
        step_ms: time of a drafting step.
        around_ms: time of a cycle's other work.
        slots: mean KV slots that a token attends to.
        most: tokens of a batch at most; `ms` of more is that of several batches.
    """

    target: TimeCurve
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
    """The times of a machine where every batch already has so many tokens and drafting steps."""

    times: BatchTime
    tokens: int
    steps: int = 0

    def ms(self, tokens: float, steps: int = 0) -> float:
        return self.times.ms(tokens + self.tokens, max(steps, self.steps))

    def tokens_within(self, ms: float, steps: int = 0) -> int:
        most = self.times.tokens_within(ms, max(steps, self.steps))
        return max(0, most - self.tokens)


def most_within(times: BatchTime, tokens: float, ms: float, steps: int) -> int:
    """Return the most tokens that fit, which is near the estimate `tokens` up to rounding.

    It is far from it only where a token's time vanishes beside that of the rest of the batch.
    """
    found = math.floor(tokens)
    for near in (found, found + 1, found - 1):
        fits = not near or times.ms(near, steps) <= ms
        if near >= 0 and fits and (near == MOST_TOKENS or times.ms(near + 1, steps) > ms):
            return near
    sizes = range(1, MOST_TOKENS + 1)
    return bisect_right(sizes, ms, key=lambda size: times.ms(size, steps))
