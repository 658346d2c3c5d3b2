"""Pace: the progress of an output in its stages, and its speed, as admission uses them.

It also judges an output that has ended. An output without stages is one stage without an end. Times
are seconds of one clock, which are passed in. Not here: the objective (`objective`).
"""

from collections.abc import Sequence

import numpy as np

from specrouter.request.objective import Objective, Stage
from specrouter.request.spec import RequestSpec

RUN_TOKENS = 10  # tokens of a run: TPOT is reported by runs along a request


class Pace:
    """The pace of one request.

    Args:
        stages: stages of the objective; empty if it has none.
        before: output tokens of an earlier attempt, which have no times. Stages that ended there
            are over.

    Attributes:
        drafts: cycles in which something was drafted for it.
        acceptance: share of the last draft that the target accepted.
    """

    def __init__(self, stages: Sequence[Stage], before: Sequence[int] = ()) -> None:
        self.drafts, self.acceptance = 0, 0.0
        self._stages = tuple(stages)
        self._ends: list[int] = []  # tokens after which stages have ended
        self._first = len(before) + 1  # the token that time counts from
        self._tokens = self._searched = 0
        self._stage_s: float | None = None
        self._find_ends(before)
        self.stages_before = len(self._ends)

    @classmethod
    def of(cls, spec: RequestSpec, arrivals: Sequence[tuple[float, int]]) -> "Pace":
        """Return the pace of a request, with the `arrivals` of earlier attempts if known."""
        stages = spec.objective.stages if spec.objective else ()
        if not arrivals:
            return cls(stages, spec.generated)
        if len(stages) < 2:  # only the first arrival and the sum matter
            rest = sum(count for _, count in arrivals[1:])
            arrivals = (arrivals[0], (arrivals[-1][0], rest))
        pace, came = cls(stages), 0
        for came_s, count in arrivals:
            came += count
            pace.take(spec.generated[:came], came_s)
        return pace

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages that are left, the current one first."""
        return self._stages[len(self._ends) :]

    def tpot_ms(self, objective: Objective | None) -> float | None:
        """Return the TPOT of the current stage, or of the whole output; None: no such objective."""
        if self.stages:
            return self.stages[0].tpot_ms
        return None if objective is None else objective.tpot_ms

    @property
    def ends(self) -> tuple[int, ...]:
        """The numbers of tokens of this attempt after which stages ended."""
        return tuple(end - self._first + 1 for end in self._ends[self.stages_before :])

    @property
    def decoded(self) -> int:
        """The tokens of this stage, without the first one of the attempt."""
        return max(0, self._tokens - self._began)

    def decode_ms(self, now_s: float) -> float:
        """Return the time of these tokens so far; 0.0 before the first token."""
        return 0.0 if self._stage_s is None else (now_s - self._stage_s) * 1000

    def take(
        self, tokens: Sequence[int], now_s: float, drafted: int = 0, accepted: int = 0
    ) -> None:
        """Take the tokens of the whole output, the last of which have come now.

        So many of the `drafted` ones were accepted.
        """
        if drafted:
            self.drafts, self.acceptance = self.drafts + 1, min(accepted, drafted) / drafted
        ends = len(self._ends)
        self._tokens = len(tokens)
        self._find_ends(tokens)
        if self._stage_s is None or len(self._ends) > ends:
            self._stage_s = now_s

    @property
    def _began(self) -> int:
        return max(self._first, self._ends[-1]) if self._ends else self._first

    def _find_ends(self, tokens: Sequence[int]) -> None:
        """Find the stages that have ended, looking at each token once."""
        while len(self._ends) < len(self._stages) - 1:
            stage, began = self._stages[len(self._ends)], self._ends[-1] if self._ends else 0
            if stage.until_tokens is not None:
                end = began + stage.until_tokens
            else:
                since = max(began, self._searched)
                found = (at for at in range(since, len(tokens)) if tokens[at] == stage.until_token)
                end = next(found, len(tokens)) + 1
            if end > len(tokens):
                break
            self._ends.append(end)
        self._searched = len(tokens)


def attained_stages(
    stages: Sequence[Stage], ends: Sequence[int], came_ms: Sequence[float]
) -> tuple[bool, ...]:
    """Return, for each stage that had tokens, whether it kept its TPOT.

    Args:
        stages: the stages.
        ends: numbers of output tokens after which stages ended, of those that have.
        came_ms: arrival of each output token.
    """
    bounds = [1, *ends, len(came_ms)]
    kept = []
    for stage, began, ended in zip(stages, bounds, bounds[1:], strict=False):
        tokens = min(ended, len(came_ms)) - began
        took_ms = came_ms[began + tokens - 1] - came_ms[began - 1] if tokens > 0 else 0.0
        kept.append(took_ms <= stage.tpot_ms * max(tokens, 0) * (1.0 + 1e-9))
    return tuple(kept)


def tpot_of_runs(commits: Sequence[tuple[float, int]]) -> list[float]:
    """Return the mean time of a token, in milliseconds, over every full run of 10 after the first.

    Tokens of one commit share the time since the one before it evenly.

    Args:
        commits: arrivals in seconds, and the number of tokens, at least 1 each.
    """
    counts = np.cumsum([count for _, count in commits])
    if not len(counts):
        return []
    came_s = [commits[0][0], *(came_s for came_s, _ in commits)]
    ends = np.arange(1, counts[-1] + 1, RUN_TOKENS)
    ends_s = np.interp(ends, [1, *counts], came_s)
    return [float(each) for each in np.diff(ends_s) * (1000 / RUN_TOKENS)]
