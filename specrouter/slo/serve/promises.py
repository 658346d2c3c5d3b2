"""Promises: the outcomes of requests that were admitted as attainable, and two lessons from them.

A prediction is a mean: of accepted tokens, of the prompts that are still to come, of a machine's
times. Two things are learned from how its promises end:

- `pace_margin`, the share of every TPOT that is kept back because a mean is not always reached. A
tenth is enough on a GPU, where others' prompts cost little, and too little on a CPU. Each promise
whose pace was missed moves it up by a step, each whose pace was kept down by a smaller one, in
balance where few miss (stochastic approximation of a quantile; Robbins and Monro, 1951). Each
request that was declined for the margin alone moves it down too: otherwise, if all ask for so tight
a TPOT, none would get a promise, and nothing could be learned.
- `error`, the share of recent predictions that did not come true. Admission departs from first
come, first served only as far as predictions are reliable; at first it does not.
"""

from dataclasses import dataclass

from specrouter.view import LEAST_PACE_MARGIN

_MOST = 0.25  # beyond it, refusals cost more than broken promises
_STEP_UP, _STEP_DOWN = 0.02, 0.001  # in balance where one of 21 misses
_REMEMBERED = 48.0  # promises, the last ones with most weight


@dataclass
class Promises:
    """The margin, and the weights of recently `kept` and `broken` promises."""

    pace_margin: float = LEAST_PACE_MARGIN
    kept: float = 0.0
    broken: float = 0.0

    @property
    def error(self) -> float:
        """The share of broken promises, as if one more were broken; `NOT_BELIEVED` without any."""
        return (self.broken + 1.0) / (self.kept + self.broken + 1.0)

    def note(self, *, kept: bool, kept_pace: bool | None) -> None:
        """Learn from the end of a request that was promised its objective.

        Args:
            kept: it attained the objective.
            kept_pace: it kept its TPOT; None: it asked for none.
        """
        fading = 1.0 - 1.0 / _REMEMBERED
        self.kept, self.broken = self.kept * fading + kept, self.broken * fading + (not kept)
        if kept_pace is not None:
            self._move(-_STEP_DOWN if kept_pace else _STEP_UP)

    def note_held_back(self, requests: int) -> None:
        """Learn from requests that got no promise for the margin alone."""
        self._move(-_STEP_DOWN * requests)

    def _move(self, by: float) -> None:
        self.pace_margin = min(max(self.pace_margin + by, LEAST_PACE_MARGIN), _MOST)
