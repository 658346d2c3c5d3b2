"""Drafts of a text that there is not: token trees drawn at random, accepted as often as they say.

Below every node the drafter's best token is accepted with a chance drawn from [0.3, 1], the same
in the mean whatever the place; the next ones share four fifths of what is left. So a tree's worths
are calibrated, differ from place to place, and its walk can be drawn.

Pure functions of arrays and a generator.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from specrouter.cycle import Candidates
from specrouter.profile.acceptance import SHAPES, TreeAcceptance, tree_rates
from specrouter.profile.snapshot import Pair

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

LEAST, MOST = 0.35, 0.95  # acceptances of best tokens that can be drawn
_LEAST_CHANCE = 0.3
_SPREAD = 1.1  # sum of the parameters of the beta distribution: most chances are near its ends
_SIBLINGS = 0.8 * 0.5 ** np.arange(1, 8)  # shares of the second best token and on of what is left
_SAMPLES = 400  # trees by which a shape is known
_KNOWN_TRIALS = 1e9  # of evidence: nothing is left to a prior
_NOWHERE = -2  # parent of no node


@dataclass(frozen=True, eq=False)
class DrawnTrees:
    """B trees of W nodes, level after level. `chances`: given the parent; `parents`: -1 for
    children of the root."""

    worth: Floats  # [B, W]; 0 for nodes that were left out
    chances: Floats
    parents: Ints
    levels: tuple[int, ...]  # nodes of each

    @property
    def candidates(self) -> Candidates:
        depths = np.repeat(np.arange(1, len(self.levels) + 1), self.levels)
        return Candidates(self.worth, np.where(self.worth > 0.0, depths, 0))

    def within(self, depths: Ints) -> "DrawnTrees":
        """Tree i without nodes deeper than `depths[i]`."""
        if (depths >= len(self.levels)).all():
            return self
        depth = np.repeat(np.arange(1, len(self.levels) + 1), self.levels)
        worth = np.where(depth <= depths[:, None], self.worth, 0.0)
        return DrawnTrees(worth, self.chances, self.parents, self.levels)

    def walk(self, chosen: Bools, draws: np.random.Generator) -> Bools:
        """[B, W] nodes that the verifier accepts of those chosen."""
        batch, first = len(chosen), 0
        at, accepted = np.full(batch, -1), np.zeros(chosen.shape, dtype=np.bool_)
        for count in self.levels:
            here = slice(first, first + count)
            below = chosen[:, here] & (self.parents[:, here] == at[:, None])
            reached = np.cumsum(np.where(below, self.chances[:, here], 0.0), axis=1)
            taken = draws.random(batch)[:, None] < reached
            goes_on = taken[:, -1]
            if not goes_on.any():
                break
            at = np.where(goes_on, first + taken.argmax(axis=1), _NOWHERE)
            rows = np.flatnonzero(goes_on)
            accepted[rows, at[rows]] = True
            first += count
        return accepted


@dataclass(frozen=True)
class SimulatedText:
    """`acceptance`: of a drafter's best token in the mean, from `LEAST` to `MOST`."""

    acceptance: float

    def draw(
        self,
        batch: int,
        widths: Sequence[int],
        draws: np.random.Generator,
        beam: bool = True,
        rates: Floats | None = None,
    ) -> DrawnTrees:
        """B trees whose level l has the best `widths[l]` of all children, as drafters keep them;
        without `beam` every node of level l has `widths[l]` children. `rates`: [B] acceptances in
        the place of the text's."""
        worth, chances, parents = [], [], []
        above, first, seen = np.ones((batch, 1)), -1, 0
        for width in widths:
            given = self._chances(batch, above.shape[1], width, draws, rates)
            reached = (above[:, :, None] * given).reshape(batch, -1)
            size = given.shape[2]
            if beam and above.shape[1] > 1:
                kept = np.argsort(-reached, axis=1, kind="stable")[:, :width]
            else:  # all of them, in order
                kept = np.broadcast_to(np.arange(reached.shape[1]), reached.shape)
            above = np.take_along_axis(reached, kept, axis=1)
            worth.append(above)
            chances.append(np.take_along_axis(given.reshape(batch, -1), kept, axis=1))
            parents.append(first + kept // size if first >= 0 else np.full_like(kept, -1))
            first, seen = seen, seen + above.shape[1]
        return DrawnTrees(
            np.concatenate(worth, axis=1),
            np.concatenate(chances, axis=1),
            np.concatenate(parents, axis=1),
            tuple(each.shape[1] for each in worth),
        )

    def _chances(
        self, batch: int, nodes: int, width: int, draws: np.random.Generator, rates: Floats | None
    ) -> Floats:
        """[B, nodes, width] of the best children, given their parent."""
        share = self.acceptance if rates is None else rates[:, None, None]
        mean = (share - _LEAST_CHANCE) / (1.0 - _LEAST_CHANCE)
        drawn = draws.beta(_SPREAD * mean, _SPREAD * (1.0 - mean), (batch, nodes, 1))
        best = _LEAST_CHANCE + (1.0 - _LEAST_CHANCE) * drawn
        return np.concatenate((best, (1.0 - best) * _SIBLINGS[: width - 1]), axis=2)


@dataclass(frozen=True)
class SimulatedTexts:
    """`known`: acceptances of pairs that have one of their own."""

    acceptance: float
    known: Mapping[Pair, float] = field(default_factory=dict)

    def of(self, proposer: str, verifier: str) -> SimulatedText:
        """What one drafts for the other."""
        share = self.known.get((proposer, verifier), self.acceptance)
        return SimulatedText(min(max(share, LEAST), MOST))


def learned(text: SimulatedText) -> TreeAcceptance:
    """What is known of its trees in the long run."""
    return TreeAcceptance(text.acceptance, _KNOWN_TRIALS)


@cache
def gain_over_law(text: SimulatedText) -> float:
    """Accepted tokens of its trees, which follow the text, over those of the best static trees, as
    outcomes tell in the long run."""
    draws, law, found, planned = np.random.default_rng(0), tree_rates(text.acceptance), 0.0, 0.0
    for row, (depth, width) in enumerate(SHAPES):
        drawn = text.draw(_SAMPLES, (width,) * depth, draws)
        found += float(drawn.worth.sum(axis=1).mean())
        planned += float(law[row].sum())
    return found / planned
