"""PaceMargin: the share of every TPOT that admission keeps back, learned from how its promises end.

A prediction is a mean: of accepted tokens, of the prompts that are still to come, of a machine's
times. How much of an objective has to be kept back for what a mean does not hold differs between
machines: on a GPU, where others' prompts cost little, a tenth is enough; on a CPU, which reads
prompts for half of its time, a third of those who are admitted with a tenth were too slow.

Each request that was admitted as attainable and kept no pace moves the margin up by a step, each
that kept it down by a smaller one, in balance where few miss (stochastic approximation of a
quantile; Robbins and Monro, 1951). So does each that was declined for the margin alone: else, where
all ask for so tight a TPOT, nobody would be promised anything any more, and nothing be learned.
"""

from dataclasses import dataclass

from specrouter.view import LEAST_PACE_MARGIN

_MOST = 0.25  # beyond which refusals cost more than promises that are not kept
_STEP_UP, _STEP_DOWN = 0.02, 0.001  # in balance where one of 21 misses


@dataclass
class PaceMargin:
    """`value`: from `LEAST_PACE_MARGIN` on."""

    value: float = LEAST_PACE_MARGIN

    def note(self, *, kept: bool) -> None:
        """A request has ended that was admitted as attainable: did it keep its TPOT?"""
        self._move(-_STEP_DOWN if kept else _STEP_UP)

    def note_held_back(self, requests: int) -> None:
        """So many were declined that would be admitted on an idle machine but for the margin."""
        self._move(-_STEP_DOWN * requests)

    def _move(self, by: float) -> None:
        self.value = min(max(self.value + by, LEAST_PACE_MARGIN), _MOST)
