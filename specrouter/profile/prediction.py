"""Predicted cost and tokens of a chain: `T_eff`, milliseconds per committed token.

    T_eff = time of a cycle / tokens that it commits for one request

A cycle is the drafter's steps, the intermediates' passes and the target's pass, each at the size of
its pack on the model's measured curve `T(n)`, and the engine's own work. The tokens are one more
than the sum of the tree's rank rates (`acceptance`), corrected by earlier outcomes. Requests that
decode in the same pass on another route wait for the drafts too: the tokens are then the mean over
all, with at least one for each of those. The catching up of models that lag is spread over the
tokens that the requests have left.
Sources: SpecRouter, sections 4.2 and 4.6, Equation 7, with measured curves in the place of `W * T`;
AdaServe, section 3, for the value of a tree.

Pure functions of a snapshot: no clock, no tensors.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from specrouter.cycle import DraftShape, Option
from specrouter.profile.acceptance import (
    SHAPE_DEPTHS,
    SHAPE_NODES,
    SHAPE_WIDTHS,
    UNTRIED_ALPHA,
    blended_alpha,
    expected_tokens,
    path_rates,
    tree_rates,
)
from specrouter.profile.cycle_times import (
    Workload,
    drafter_ms,
    drafting_ms,
    model_ms,
    stage_ms,
    verification_ms,
)
from specrouter.profile.snapshot import Mode, PerformanceSnapshot, outcome_of
from specrouter.request.params import (
    MAX_TREE_TOKENS,
    Chain,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_NODES = np.array([1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64])


@dataclass(frozen=True)
class ShapeLimits:
    """The fixed parts of a shape; None leaves a part to the prediction."""

    depth: int | None = None
    width: int | None = None
    nodes: int | None = None
    whole_trees: bool = False  # no selection among the nodes of a draft


def target_only(snapshot: PerformanceSnapshot, workload: Workload, target: str) -> Option:
    everyone = np.array([workload.batch])
    plain_ms = float(verification_ms(snapshot, workload, target, everyone)[0])
    cycle_ms = plain_ms * outcome_of(snapshot, (target,), workload.batch, workload.sampled).time
    return Option(
        chain=(target,),
        cycle_ms=cycle_ms,
        ms_per_token=cycle_ms,
        plain_ms=plain_ms,
        sampled=workload.sampled,
    )


@dataclass(frozen=True, eq=False)
class Menu:
    """Some options of a grid, [E] each: their rows and columns, and what is predicted."""

    rows: NDArray[np.intp]
    columns: NDArray[np.intp]
    nodes: Ints
    tokens: Floats
    levels_ms: Floats


class OptionGrid:
    """Predictions of one chain of at least two models: shapes x nodes, [O, G].

    Attributes:
        nodes, tokens, cycle_ms, ms_per_token: values of the options; see `Option`.
        allowed: where the options are.
        levels_ms: [O, 1] time of the cycle before the target's pass.
        correction: factor of earlier outcomes on times.
    """

    def __init__(
        self,
        chain: Chain,
        snapshot: PerformanceSnapshot,
        workload: Workload,
        limits: ShapeLimits,
    ) -> None:
        self.chain = chain
        rates, offered = _offer(chain, snapshot, workload.sampled)
        sizes = np.ceil(offered)[:, None]  # nodes to select from
        nodes = np.broadcast_to(_NODES, (len(SHAPE_NODES), len(_NODES)))
        self._is_open = not limits.whole_trees and limits.nodes is None
        if limits.whole_trees:
            nodes = np.broadcast_to(sizes.astype(np.int64), nodes.shape)
        elif limits.nodes is not None:
            nodes = np.minimum(limits.nodes, np.broadcast_to(sizes.astype(np.int64), nodes.shape))
        self.nodes: Ints = np.maximum(nodes, 1)
        tokens = np.take_along_axis(expected_tokens(rates), self.nodes, axis=1)
        self._plain_tokens: Floats = tokens
        outcome = outcome_of(snapshot, chain, workload.batch, workload.sampled)
        self.correction = outcome.time
        self.tokens: Floats = np.maximum(1.0, 1.0 + (tokens - 1.0) * outcome.tokens)
        self.levels_ms: Floats = self._find_levels_ms(snapshot, workload)
        self._plain_ms: Floats = self.levels_ms + self._target_ms(snapshot, workload)
        self.cycle_ms: Floats = self._plain_ms * outcome.time
        catch_up = sum(
            float(model_ms(snapshot, name, chain[-1], workload, np.array([lag]))[0])
            for name in chain[:-1]
            if (lag := workload.lags.get(name, 0.0)) >= 1.0
        )
        spread = max(1.0, workload.remaining)
        mean_tokens = (workload.requests * self.tokens + workload.others) / workload.batch
        self.ms_per_token: Floats = self.cycle_ms / mean_tokens + catch_up / spread
        self.allowed = (self.nodes <= sizes) & self._allowed(limits)[:, None]
        self.ms_per_token = np.where(self.allowed, self.ms_per_token, np.inf)
        self.workload = workload

    def best(self) -> Option:
        return self.option(*np.unravel_index(np.argmin(self.ms_per_token), self.tokens.shape))

    def like(self, option: Option) -> Option | None:
        """Return the current prediction of an option chosen before; None: it is not allowed."""
        wanted = option.shape
        same = np.equal(SHAPE_DEPTHS, wanted.depth) & np.equal(SHAPE_WIDTHS, wanted.width)
        where = np.argwhere(same[:, None] & (self.nodes == wanted.nodes))
        if not len(where):
            return None
        found = self.option(where[0][0], where[0][1])
        return found if np.isfinite(found.ms_per_token) else None

    def option(self, shape: int | np.intp, place: int | np.intp) -> Option:
        """Return the option of a row and a column."""
        return Option(
            chain=self.chain,
            shape=DraftShape(
                int(SHAPE_DEPTHS[shape]), int(SHAPE_WIDTHS[shape]), int(self.nodes[shape, place])
            ),
            cycle_ms=float(self.cycle_ms[shape, place]),
            tokens=float(self.tokens[shape, place]),
            ms_per_token=float(self.ms_per_token[shape, place]),
            levels_ms=float(self.levels_ms[shape, 0]) * self.correction,
            plain_ms=float(self._plain_ms[shape, place]),
            plain_tokens=float(self._plain_tokens[shape, place]),
            sampled=self.workload.sampled,
        )

    def _allowed(self, limits: ShapeLimits) -> NDArray[np.bool_]:
        """Return whether each shape [O] is within the limits."""
        allowed = np.ones(len(SHAPE_DEPTHS), dtype=np.bool_)
        if limits.depth is not None:
            allowed &= _least_at_least(SHAPE_DEPTHS, limits.depth)
        if limits.width is not None and allowed.any():  # as wide as a tree of that depth may be
            allowed &= _least_at_least(SHAPE_WIDTHS, limits.width, allowed)
        return np.asarray(allowed)

    @cached_property
    def menu(self) -> Menu:
        """The options that may be the best for some cycle.

        Of the same number of nodes, none is both faster to draft and better than another.
        """
        rows, columns = np.nonzero(self.allowed)
        nodes, tokens = self.nodes[rows, columns], self.tokens[rows, columns]
        levels_ms = self.levels_ms[rows, 0]
        order = np.lexsort((-tokens, levels_ms, nodes))
        nodes, tokens, levels_ms = nodes[order], tokens[order], levels_ms[order]
        # Within a number of nodes, from the cheapest on: an option stays if it beats all before.
        ahead = nodes * float(MAX_TREE_TOKENS + 1)
        best_before = np.maximum.accumulate(np.concatenate(([-1.0], (ahead + tokens)[:-1])))
        kept = ahead + tokens > best_before + 1e-3
        return Menu(
            rows[order][kept], columns[order][kept], nodes[kept], tokens[kept], levels_ms[kept]
        )

    def _find_levels_ms(self, snapshot: PerformanceSnapshot, workload: Workload) -> Floats:
        """Return the time [O, 1] of everything before the target's pass."""
        batch, target = workload.requests, self.chain[-1]
        drafting = drafter_ms(snapshot, workload, self.chain, SHAPE_DEPTHS, SHAPE_WIDTHS)
        total = np.zeros(len(SHAPE_NODES))
        for index, name in enumerate(self.chain[1:-1], start=1):
            prefix = self.chain[:index]
            _, offered = _offer((*prefix, name), snapshot, workload.sampled)
            places = batch * (1 + offered)
            judging = model_ms(snapshot, name, target, workload, places)
            total += judging + stage_ms(snapshot, "verify", places)
        total += drafting + drafting_ms(snapshot, workload.batch)
        return np.asarray(total)[:, None]

    def _target_ms(self, snapshot: PerformanceSnapshot, workload: Workload) -> Floats:
        """Return the time of the target's pass, [O, G], or [1, G] if all shapes have the same."""
        target, requests, batch = self.chain[-1], workload.requests, workload.batch
        if not self._is_open:
            return verification_ms(snapshot, workload, target, batch + requests * self.nodes)
        key = (target, requests, batch, workload.slots)
        if key not in snapshot.target_ms:  # all chains of a decision share it
            places = batch + (requests * _NODES)[None, :]
            snapshot.target_ms[key] = verification_ms(snapshot, workload, target, places)
        return snapshot.target_ms[key]


def acceptance_rate(
    proposers: Chain, verifier: str, snapshot: PerformanceSnapshot, sampled: Mode = True
) -> float:
    """Return the acceptance of the best draft token after an accepted parent, on the current text.

    It is the observed one of these proposers, blended by evidence with that of the last of them, or
    for a single one with the prediction from similarity.
    """
    seen = snapshot.trees.get((proposers, verifier, sampled))
    if len(proposers) > 1:
        return blended_alpha(seen, acceptance_rate(proposers[-1:], verifier, snapshot, sampled))
    prior = snapshot.promised_alpha.get((proposers[0], verifier, sampled), UNTRIED_ALPHA)
    return blended_alpha(seen, prior)


def _offer(chain: Chain, snapshot: PerformanceSnapshot, sampled: Mode) -> tuple[Floats, Floats]:
    """Return what the last model of a chain is offered: rank rates [O, RANKS], and nodes [O].

    A drafter's tree has depth x width nodes. An intermediate offers, at width 1, the path that it
    accepted and its own next token; in wider trees the drafter's nodes with its own scores.
    """
    key = (chain, sampled)
    if key not in snapshot.offers:
        snapshot.offers[key] = _find_offer(chain, snapshot, sampled)
    return snapshot.offers[key]


def _find_offer(
    chain: Chain, snapshot: PerformanceSnapshot, sampled: Mode
) -> tuple[Floats, Floats]:
    proposers, verifier = chain[:-1], chain[-1]
    alpha = acceptance_rate(proposers, verifier, snapshot, sampled)
    if len(proposers) == 1:
        return tree_rates(alpha), SHAPE_NODES.astype(np.float64)
    before, nodes = _offer(proposers, snapshot, sampled)
    last = np.minimum(nodes.astype(np.int64), MAX_TREE_TOKENS)[:, None]
    lengths = np.take_along_axis(expected_tokens(before), last, axis=1)[:, 0]
    offered = np.where(SHAPE_WIDTHS == 1, lengths, SHAPE_NODES * 1.0)
    return path_rates(alpha, lengths), np.maximum(1.0, offered)


def _least_at_least(
    grid: Ints, wanted: int, among: NDArray[np.bool_] | None = None
) -> NDArray[np.bool_]:
    """Return which of the grid's values stand for a wanted one that may lie between them."""
    known = grid if among is None else grid[among]
    above = known[known >= wanted]
    return np.asarray(grid == (above.min() if len(above) else known.max()))
