"""Acceptance of the nodes of drafted trees, learned from verified trees.

A node's probability given its parent is corrected by the past acceptance of such probabilities
(calibration), by its place among its siblings: a small drafter underestimates its first choice and
is right about its third. The tokens of a tree of some shape are predicted from one number, alpha,
the share of best children of walked nodes that are accepted, and the law of the best static trees
for it (Sequoia, arXiv 2402.12374). The error of that law for a chain is a factor of its outcomes.

Texts change, so the acceptance of best children is kept for the last cycles too, and blended with
the long-term one while there is little evidence.

Pure bookkeeping: no clock, no tensors.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specrouter.profile.calibration import Calibration, CalibrationFigures
from specrouter.profile.evidence import MEMORY, PRIOR, RECENT, age
from specrouter.request.params import MAX_TREE_TOKENS

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
_WIDTHS = (1, 2, 3, 4, 6, 8)
SHAPES: tuple[tuple[int, int], ...] = tuple(
    (depth, width) for width in _WIDTHS for depth in _DEPTHS if depth * width <= MAX_TREE_TOKENS
)
SHAPE_DEPTHS = np.array([depth for depth, _ in SHAPES])
SHAPE_WIDTHS = np.array([width for _, width in SHAPES])
SHAPE_NODES = SHAPE_DEPTHS * SHAPE_WIDTHS
RANKS = MAX_TREE_TOKENS

UNTRIED_ALPHA = 0.7  # for a pair that was never compared; high, so that it is tried
_BREADTH = 0.64  # chance that none of w tokens is the choice: (1 - alpha) ** (w ** _BREADTH)


@dataclass(frozen=True, eq=False, kw_only=True)
class JudgedTrees:
    """Drafted trees of B requests, [B, n] each; nodes of log-probability -inf are padding."""

    parents: Ints
    depths: Ints
    log_probs: Floats  # of the path from the root, by the model that scored it last
    judged: Bools  # nodes that the verifier scored
    accepted: Bools  # nodes on the verifier's walk
    is_usual: bool = True  # False: drafted because they looked good, so not representative


@dataclass(frozen=True)
class TreeAcceptance:
    """The acceptance of a chain's trees at one moment.

    `alpha`: share of best children of walked nodes that were accepted, of `trials`;
    `recent_accepted` of `recent_trials` in the last cycles.
    """

    alpha: float
    trials: float
    calibration: CalibrationFigures = field(default_factory=CalibrationFigures)
    recent_accepted: float = 0.0
    recent_trials: float = 0.0

    @property
    def alpha_now(self) -> float:
        """The acceptance on the current text, blended with `alpha` if there is little evidence."""
        accepted = self.recent_accepted + PRIOR * self.alpha
        return accepted / (self.recent_trials + PRIOR)


class AcceptanceEstimator:
    """The estimator for one chain of proposers and the model that verifies them. Not thread-safe.

    Args:
        quotes: for text drafters, levels below the first are calibrated apart: where the beginning
            of a quotation is right, the rest usually is.
        factor: correction of the first level's probabilities before any was seen.
    """

    def __init__(self, quotes: bool = False, factor: float = 1.0) -> None:
        self._calibration = Calibration(factor)
        self._further = Calibration() if quotes else None  # below the first level
        self._trials = 0.0
        self._accepted = 0.0
        self._recent = np.zeros(2)  # accepted, judged
        self.last_cycle = 0  # of the last observation

    @property
    def is_finite(self) -> bool:
        counts = self._trials + self._accepted + float(self._recent.sum())
        return math.isfinite(counts) and all(one.is_finite for one in self._calibrations)

    @property
    def _calibrations(self) -> tuple[Calibration, ...]:
        further = self._further
        return (self._calibration,) if further is None else (self._calibration, further)

    def record(self, trees: JudgedTrees, cycle: int) -> None:
        self._fade(cycle)
        real = np.isfinite(trees.log_probs)
        stated, place = _given_parents(trees.parents, trees.log_probs)
        walked = np.concatenate((np.ones((len(real), 1), np.bool_), trees.accepted), axis=1)
        asked = trees.judged & real & np.take_along_axis(walked, trees.parents + 1, axis=1)
        predicted = self._predicted(trees.parents, stated, place)
        for index, calibration in enumerate(self._calibrations):
            own = asked if self._further is None else asked & ((trees.parents >= 0) == bool(index))
            if own.any():
                calibration.record(stated[own], place[own], trees.accepted[own], predicted[own])
        if trees.is_usual:
            self._count_best(trees, real, walked, asked & (place == 0), place)

    def _count_best(
        self, trees: JudgedTrees, real: Bools, walked: Bools, asked: Bools, place: Ints
    ) -> None:
        """Count best children, [B, n] those of walked nodes.

        A drafter without a draft for a row counts as one failure at the root.
        """
        missing = float((~real.any(axis=1)).sum())
        self._count(float((asked & trees.accepted).sum()), float(asked.sum()) + missing)
        self._recent += 0.0, missing
        # If a selection left out first choices, the verified ones are better than usual: skip them.
        firsts = real & (place == 0) & np.take_along_axis(walked, trees.parents + 1, axis=1)
        for fair in (firsts, firsts & (trees.parents < 0)):
            if fair.any() and trees.judged[fair].all():
                self._recent += trees.accepted[fair].sum(), fair.sum()
                break

    def record_choices(self, stated: Floats, accepted: Bools, cycle: int) -> None:
        """Learn from what the proposers would have drafted at places [n, w] of the committed text.

        Args:
            stated: probabilities of the best w tokens after each place, best first.
            accepted: which of them was the verifier's choice.
            cycle: the current cycle.
        """
        self._fade(cycle)
        place = np.broadcast_to(np.arange(stated.shape[1]), stated.shape)
        predicted = self._predicted(np.full_like(place, -1), stated, place)
        self._calibration.record(stated.ravel(), place.ravel(), accepted.ravel(), predicted.ravel())
        best = accepted[:, 0]
        self._count(float(best.sum()), float(len(best)))
        self._recent += best.sum(), len(best)

    def _count(self, hits: float, count: float) -> None:
        """Count best children that were verified."""
        fade = max(0.0, 1.0 - count / MEMORY)
        self._trials = self._trials * fade + count
        self._accepted = self._accepted * fade + hits

    def worth(self, parents: Ints, depths: Ints, log_probs: Floats) -> Floats:
        """Return the chance [B, n] that each node is on the verifier's walk; 0 for padding.

        Never more than its parent's, nor do siblings add up to more: the walk takes at most one of
        them.
        """
        worth = self._predicted(parents, *_given_parents(parents, log_probs))
        for depth in range(2, int(depths.max(initial=0)) + 1):
            here = np.nonzero(depths == depth)
            worth[here] *= worth[here[0], np.maximum(parents[here], 0)]
        return worth

    def path_worth(self, stated: Sequence[float]) -> list[float]:
        """Return `worth` of a path, from each token's probability after those before it."""
        found, together = list[float](), 1.0
        calibration = self._calibration
        for probability in stated:
            together *= calibration.of_best(probability)
            found.append(together)
            calibration = self._further or self._calibration
        return found

    def _predicted(self, parents: Ints, stated: Floats, place: Ints) -> Floats:
        """Return the corrected probabilities [B, n] of nodes given their parents.

        Each is corrected on its own, so those of siblings are scaled to add up to at most 1.
        """
        corrected = self._calibration.probability(stated, place)
        if self._further is not None:
            further = self._further.probability(stated, place)
            corrected = np.where(parents < 0, corrected, further)
        batch, count = parents.shape
        families = parents + 1 + np.arange(batch)[:, None] * (count + 1)
        sums = np.bincount(families.ravel(), corrected.ravel(), minlength=batch * (count + 1))
        shared: Floats = corrected / np.maximum(sums, 1.0)[families]
        return shared

    def snapshot(self, cycle: int) -> TreeAcceptance:
        passed = cycle - self.last_cycle
        alpha = self._accepted / self._trials if self._trials else math.nan
        recent = self._recent * age(passed, RECENT)
        return TreeAcceptance(
            alpha,
            self._trials * age(passed),
            self._calibration.figures(),
            recent[0],
            recent[1],
        )

    def _fade(self, cycle: int) -> None:
        passed = cycle - self.last_cycle
        self._trials *= age(passed)
        self._accepted *= age(passed)
        self._recent *= age(passed, RECENT)
        for calibration in self._calibrations:
            calibration.fade(age(passed))
        self.last_cycle = cycle


def similarity_to_acceptance(similarity: float) -> float:
    """Return (1 - TV) / (1 + TV), the least acceptance that shared noise guarantees.

    Source: Daliri, Musco, Suresh, arXiv 2408.07978.
    """
    return similarity / (2.0 - similarity)


@functools.lru_cache(maxsize=256)
def _tree_rates(alpha_percent: int) -> Floats:
    alpha = alpha_percent / 100
    holds = 1.0 - (1.0 - alpha) ** (np.arange(max(_WIDTHS) + 1) ** _BREADTH)
    child = np.diff(holds)  # chance of the best, second, ... child of a walked node
    rates = np.zeros((len(SHAPES), RANKS))
    for width in _WIDTHS:
        beam, levels = np.ones(1), []
        for _ in range(max(_DEPTHS)):
            beam = -np.sort(-np.outer(beam, child[:width]).ravel())[:width]
            levels.append(np.pad(beam, (0, width - len(beam))))
        for shape, (depth, wide) in enumerate(SHAPES):
            if wide == width:
                rates[shape, : depth * width] = -np.sort(-np.concatenate(levels[:depth]))
    rates.setflags(write=False)
    return rates


def tree_rates(alpha: float) -> Floats:
    """Return rank rates of beams whose best child is accepted with chance `alpha` everywhere.

    The best static trees (Sequoia, arXiv 2402.12374); real trees, which follow the text, do better.
    """
    return _tree_rates(round(100 * min(max(alpha, 0.01), 0.99)))


def path_rates(alpha: float, lengths: Floats) -> Floats:
    """Return the rank rates [len(SHAPES), RANKS] of paths with mean lengths `lengths[o]`."""
    place = np.arange(RANKS)
    there = np.clip(lengths[:, None] - place, 0.0, 1.0)
    return np.asarray(there * alpha ** (place + 1))


def blended_alpha(seen: TreeAcceptance | None, prior: float) -> float:
    """Return the acceptance on the current text, blended by evidence with the prior."""
    if seen is None or not seen.trials:
        return prior
    share = seen.trials / (seen.trials + PRIOR)
    return share * seen.alpha_now + (1.0 - share) * prior


def expected_tokens(rates: Floats) -> Floats:
    """Return the tokens [O, RANKS + 1] that so many nodes commit, the verifier's own included."""
    return np.concatenate((np.ones((len(rates), 1)), 1.0 + np.cumsum(rates, axis=1)), axis=1)


def _better(log_probs: Floats) -> Bools:
    """Return whether node j ranks before node i, [B, n, n]; of equals the first does."""
    count = log_probs.shape[1]
    earlier = np.arange(count)[None, :] < np.arange(count)[:, None]
    mine, others = log_probs[:, :, None], log_probs[:, None, :]
    return np.asarray((others > mine) | ((others == mine) & earlier))


def _given_parents(parents: Ints, log_probs: Floats) -> tuple[Floats, Ints]:
    """Return each node's [B, n] probability given its parent, and its place among its siblings.

    The probability is 0 for padding.
    """
    real = np.isfinite(log_probs)
    lowest = np.where(real, log_probs, 0.0)
    above = np.concatenate((np.zeros((len(real), 1)), lowest), axis=1)
    before = np.take_along_axis(above, parents + 1, axis=1)
    stated = np.where(real, np.exp(np.minimum(lowest - before, 0.0)), 0.0)
    siblings = (parents[:, :, None] == parents[:, None, :]) & real[:, None, :]
    place: Ints = (siblings & _better(log_probs)).sum(axis=2)
    return stated, place
