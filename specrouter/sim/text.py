"""Drafts of a text that there is not: token trees drawn at random, accepted as often as they say.

Below every node the drafter's best token is accepted with a chance drawn from [0.3, 1], the same
in the mean whatever the place; the next ones share four fifths of what is left. So a tree's worths
are calibrated, differ from place to place, and its walk can be drawn.

Pure functions of arrays and a generator.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from specrouter.cycle import Candidates
from specrouter.profile.acceptance import SHAPES, TreeAcceptance, tree_rates

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

LEAST, MOST = 0.35, 0.95  # acceptances of best tokens that can be drawn
_LEAST_CHANCE = 0.3
_SPREAD = 1.1  # sum of the parameters of the beta distribution: most chances are near its ends
_SIBLINGS = 0.8 * 0.5 ** np.arange(1, 8)  # shares of the second best token and on of what is left
_SAMPLES = 400  # trees by which a shape is known
_KNOWN_TRIALS = 1e9  # of evidence: nothing is left to a prior


@dataclass(frozen=True, eq=False)
class DrawnTrees:
    """B trees of W nodes. `chances`: given the parent; `parents`: -1 for children of the root."""

    worth: Floats  # [B, W]
    chances: Floats
    parents: Ints
    depths: Ints

    @property
    def candidates(self) -> Candidates:
        return Candidates(self.worth, self.depths)

    def walk(self, chosen: Bools, draws: np.random.Generator) -> Ints:
        """[B] nodes that the verifier accepts of those chosen."""
        accepted = np.zeros(len(chosen), dtype=np.int64)
        for row, nodes in enumerate(chosen):
            at = -1
            while True:
                below = np.flatnonzero(nodes & (self.parents[row] == at))
                reached = np.cumsum(self.chances[row, below])
                place = int(np.searchsorted(reached, draws.random(), side="right"))
                if place >= len(below):
                    break
                at = int(below[place])
                accepted[row] += 1
        return accepted


@dataclass(frozen=True)
class SimulatedText:
    """`acceptance`: of a drafter's best token in the mean, from `LEAST` to `MOST`."""

    acceptance: float

    def draw(self, batch: int, depth: int, width: int, draws: np.random.Generator) -> DrawnTrees:
        """The best `width` of all children on each of `depth` levels, as drafters keep them."""
        worth, chances, parents = [], [], []
        above, first = np.ones((batch, 1)), -1
        for level in range(depth):
            given = self._chances(batch, above.shape[1], width, draws)
            reached = (above[:, :, None] * given).reshape(batch, -1)
            kept = np.argsort(-reached, axis=1, kind="stable")[:, :width]
            above = np.take_along_axis(reached, kept, axis=1)
            worth.append(above)
            chances.append(np.take_along_axis(given.reshape(batch, -1), kept, axis=1))
            parents.append(first + kept // given.shape[2] if level else np.full_like(kept, -1))
            first = level * width
        depths = np.repeat(np.arange(1, depth + 1), width)
        return DrawnTrees(
            np.concatenate(worth, axis=1),
            np.concatenate(chances, axis=1),
            np.concatenate(parents, axis=1),
            np.tile(depths, (batch, 1)),
        )

    def _chances(self, batch: int, nodes: int, width: int, draws: np.random.Generator) -> Floats:
        """[B, nodes, width] of the best children, given their parent."""
        mean = (self.acceptance - _LEAST_CHANCE) / (1.0 - _LEAST_CHANCE)
        drawn = draws.beta(_SPREAD * mean, _SPREAD * (1.0 - mean), (batch, nodes, 1))
        best = _LEAST_CHANCE + (1.0 - _LEAST_CHANCE) * drawn
        return np.concatenate((best, (1.0 - best) * _SIBLINGS[: width - 1]), axis=2)


def learned(text: SimulatedText) -> TreeAcceptance:
    """What is known of its trees in the long run."""
    return TreeAcceptance(text.acceptance, _KNOWN_TRIALS)


@cache
def gain_over_law(text: SimulatedText) -> float:
    """Accepted tokens of its trees, which follow the text, over those of the best static trees, as
    outcomes tell in the long run."""
    draws, law, found, planned = np.random.default_rng(0), tree_rates(text.acceptance), 0.0, 0.0
    for row, (depth, width) in enumerate(SHAPES):
        found += float(text.draw(_SAMPLES, depth, width, draws).worth.sum(axis=1).mean())
        planned += float(law[row].sum())
    return found / planned
