"""Calibration: a drafter's probabilities, corrected to match the observed acceptance.

A node's probability given its parent, from the (perturbed) scores of the model that scored it last,
estimates the chance that the verifier accepts it where it has accepted the parent. It is corrected
by the share of nodes of about that probability that were accepted, by their place among their
siblings: a small drafter underestimates its first choice and is right about its third. (Depth adds
nothing to these: it was tried.) Every prediction is noted before its outcome is learned from, so
the reported errors are those of the probabilities that trees were selected by.

Pure bookkeeping: no clock, no tensors. Not thread-safe.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specrouter.profile.evidence import PRIOR

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_NODES = 2000.0  # nodes after which older ones have faded
_EDGES = np.array([0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 0.95])  # of bins of probabilities
_BINS = len(_EDGES) + 1
_BOUNDS = _EDGES.tolist()
_FEW = 4.0  # prior weight, as a sum of probabilities
_PLACES = 3  # distinguished places among siblings: best, second, others


@dataclass(frozen=True)
class CalibrationFigures:
    """The errors of predictions for nodes whose parent was accepted.

    Attributes:
        nodes: nodes that the figures rest on, older ones faded.
        expected_error: mean distance of predicted and observed acceptance over bins (ECE).
        brier: mean squared error of the predictions; `base_brier` that of the share accepted.
    """

    nodes: float = 0.0
    expected_error: float = 0.0
    brier: float = 0.0
    base_brier: float = 0.0


class Calibration:
    """The calibration for one chain of proposers, its verifier and sampling mode."""

    def __init__(self, factor: float = 1.0) -> None:
        """Start with `factor`, the correction of probabilities before any was seen."""
        self._factor = factor
        self._best: tuple[float, list[float], list[float]] | None = None  # see `of_best`
        self._stated = np.zeros(_PLACES * _BINS)  # sums of probabilities
        self._hits = np.zeros(_PLACES * _BINS)
        self._shown = np.zeros((3, _BINS))  # nodes, predictions, hits
        self._squares = 0.0

    @property
    def is_finite(self) -> bool:
        sums = self._stated.sum() + self._hits.sum() + self._shown.sum() + self._squares
        return math.isfinite(sums)

    def probability(self, stated: Floats, place: Ints) -> Floats:
        """Return the corrected probabilities, shaped as `stated`, of nodes given their parents."""
        bins = _bins(stated, place)
        shown, hits = self._stated[bins], self._hits[bins]
        usual = self._usual()[np.minimum(place, _PLACES - 1)]
        factor = (hits + PRIOR * stated * usual) / np.maximum(shown + PRIOR * stated, 1e-12)
        corrected: Floats = np.minimum(stated * factor, 1.0)
        return corrected

    def of_best(self, stated: float) -> float:
        """Return `probability` of a best child."""
        if self._best is None:
            usual = float(self._usual()[0])
            self._best = usual, self._stated[:_BINS].tolist(), self._hits[:_BINS].tolist()
        usual, shown, hits = self._best
        at, prior = bisect_right(_BOUNDS, stated), PRIOR * stated
        factor = (hits[at] + prior * usual) / max(shown[at] + prior, 1e-12)
        return min(stated * factor, 1.0)

    def _usual(self) -> Floats:
        """Return the factors [_PLACES] over all bins, which are the prior of each bin."""
        shown = self._stated.reshape(_PLACES, _BINS).sum(axis=1)
        hits = self._hits.reshape(_PLACES, _BINS).sum(axis=1)
        found: Floats = (hits + _FEW * self._factor) / (shown + _FEW)
        return found

    def record(
        self, stated: Floats, place: Ints, accepted: Bools, predicted: Floats | None = None
    ) -> None:
        """Learn from nodes [n] whose parents were accepted.

        `predicted` is what trees were selected by, if that is not `probability` alone.
        """
        predicted = self.probability(stated, place) if predicted is None else predicted
        self._note(predicted, accepted)
        self._best = None
        fade = max(0.0, 1.0 - len(stated) / _NODES)
        bins, size = _bins(stated, place), len(self._hits)
        self._stated = self._stated * fade + np.bincount(bins, stated, minlength=size)
        self._hits = self._hits * fade + np.bincount(bins, accepted, minlength=size)

    def fade(self, factor: float) -> None:
        """Reduce the weight of all evidence."""
        self._best = None
        self._stated *= factor
        self._hits *= factor

    def figures(self) -> CalibrationFigures:
        nodes, predicted, hits = self._shown
        total = float(nodes.sum())
        if not total:
            return CalibrationFigures()
        base = float(hits.sum()) / total
        error = float(np.abs(predicted - hits).sum()) / total
        return CalibrationFigures(total, error, self._squares / total, base * (1.0 - base))

    def _note(self, predicted: Floats, accepted: Bools) -> None:
        fade = max(0.0, 1.0 - len(predicted) / _NODES)
        bins = np.searchsorted(_EDGES, predicted, "right")
        for row, weights in enumerate((np.ones_like(predicted), predicted, accepted)):
            found = np.bincount(bins, weights, minlength=_BINS)
            self._shown[row] = self._shown[row] * fade + found
        squares = float(((predicted - accepted) ** 2).sum())
        self._squares = self._squares * fade + squares


def _bins(stated: Floats, place: Ints) -> Ints:
    bins: Ints = np.minimum(place, _PLACES - 1) * _BINS + np.searchsorted(_EDGES, stated, "right")
    return bins
