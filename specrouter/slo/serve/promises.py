"""Promises: how those ended that admission admitted as attainable, and what follows from it.

A prediction is a mean: of accepted tokens, of the prompts that are still to come, of a machine's
times. Two things are learned from how its promises end:

- `pace_margin`, the share of every TPOT that is kept back for what a mean does not hold. A tenth is
  enough on a GPU, where others' prompts cost little, and too little on a CPU. Each promise that
  kept no pace moves it up by a step, each that kept it down by a smaller one, in balance where few
  miss (stochastic approximation of a quantile; Robbins and Monro, 1951). So does each request that
  was declined for the margin alone: else, where all ask for so tight a TPOT, nobody would be
  promised anything any more, and nothing be learned.
- `error`, the share of predictions that did not come true of late. Admission departs from first
  come, first served only as far as it may be believed; with nothing learned it is not.
"""

from dataclasses import dataclass

from specrouter.view import LEAST_PACE_MARGIN

_MOST = 0.25  # beyond which refusals cost more than promises that are not kept
_STEP_UP, _STEP_DOWN = 0.02, 0.001  # in balance where one of 21 misses
_REMEMBERED = 48.0  # promises, of which the last ones say most


@dataclass
class Promises:
    """`pace_margin`: from `LEAST_PACE_MARGIN` on. `kept`, `broken`: of late."""

    pace_margin: float = LEAST_PACE_MARGIN
    kept: float = 0.0
    broken: float = 0.0

    @property
    def error(self) -> float:
        """The broken ones' share, as if one more were broken; `NOT_BELIEVED` without any."""
        return (self.broken + 1.0) / (self.kept + self.broken + 1.0)

    def note(self, *, kept: bool, kept_pace: bool | None) -> None:
        """A request has ended that was promised its objective: did it attain that, and did it keep
        its TPOT? None: none was asked for."""
        fading = 1.0 - 1.0 / _REMEMBERED
        self.kept, self.broken = self.kept * fading + kept, self.broken * fading + (not kept)
        if kept_pace is not None:
            self._move(-_STEP_DOWN if kept_pace else _STEP_UP)

    def note_held_back(self, requests: int) -> None:
        """So many were not promised what an idle machine could keep, for the margin alone."""
        self._move(-_STEP_DOWN * requests)

    def _move(self, by: float) -> None:
        self.pace_margin = min(max(self.pace_margin + by, LEAST_PACE_MARGIN), _MOST)
