"""What a chain is predicted to cost and to bring: `T_eff`, milliseconds per committed token.

    T_eff = time of a cycle / tokens that it commits for one request

A cycle is the drafter's steps, the intermediates' passes and the target's pass, each at the size of
its pack on the model's measured curve `T(n)`, and the engine's own work. The tokens are one more
than the sum of the tree's rank rates (`acceptance`), times what earlier outcomes say. Requests that
decode in the same pass and are routed otherwise wait for the drafts too: the tokens are then the
mean over all, of which those gain at least one. Catching up of models that lag is spread over the
tokens that the requests have left.
Sources: SpecRouter, sections 4.2 and 4.6, Equation 7, with measured curves in the place of
`W * T`; AdaServe, section 3, for the value of a tree.

Pure functions of a snapshot: no clock, no tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
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
from specrouter.profile.snapshot import Mode, PerformanceSnapshot, outcome_of
from specrouter.profile.time_curve import ForwardTimes, TimeCurve
from specrouter.request.params import (
    MAX_DEPTH,
    MAX_TREE_TOKENS,
    Chain,
)
from statemgr.row_groups import READING_QUERIES

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_UNTRIED_SPEED = 0.02  # least share of the target's time that an untried model is assumed to take
_NODES = np.array([1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64])
_STEADY_LAG = 2  # tokens that a drafter's first step reads: it never saw the last two


@dataclass(frozen=True, eq=False)
class Workload:
    """The requests that decode together.

    Attributes:
        slots: KV slots that attention reads for each of them.
        remaining: tokens that each may still generate, in the mean.
        lags: tokens that a model has not read yet, over all requests; the last two not counted.
        others: further requests, that decode in the same pass of the target and are routed apart.
    """

    requests: int
    slots: int = 128
    remaining: float = 64.0
    lags: Mapping[str, float] = field(default_factory=dict)
    sampled: Mode = True
    others: int = 0

    @property
    def batch(self) -> int:
        """Requests in the target's pass."""
        return self.requests + self.others


@dataclass(frozen=True)
class Limits:
    """What a caller or the configuration leaves open; None leaves it to the prediction."""

    depth: int | None = None
    width: int | None = None
    nodes: int | None = None
    whole_trees: bool = False  # no selection among the nodes of a draft
    max_depth: int = MAX_DEPTH


def target_only(snapshot: PerformanceSnapshot, workload: Workload, target: str) -> Option:
    everyone = np.array([workload.batch])
    plain_ms = float(verification_ms(snapshot, workload, target, everyone)[0])
    cycle_ms = plain_ms * outcome_of(snapshot, (target,), workload.batch, workload.sampled).time
    return Option(
        (target,),
        cycle_ms=cycle_ms,
        ms_per_token=cycle_ms,
        plain_ms=plain_ms,
        sampled=workload.sampled,
    )


@dataclass(frozen=True, eq=False)
class Menu:
    """Some options of a grid, [E] each: where they stand in it, and what is predicted."""

    rows: NDArray[np.intp]
    columns: NDArray[np.intp]
    nodes: Ints
    tokens: Floats
    levels_ms: Floats


class OptionGrid:
    """Predictions of one chain of at least two models: shapes x nodes, [O, G].

    Attributes:
        nodes, tokens, cycle_ms, ms_per_token: of the options; see `Option`.
        allowed: where the options are.
        levels_ms: [O, 1] of the cycle, before the target's pass.
        correction: factor that earlier outcomes put on times.
    """

    def __init__(
        self,
        chain: Chain,
        snapshot: PerformanceSnapshot,
        workload: Workload,
        limits: Limits,
    ) -> None:
        self.chain = chain
        rates, offered = _offer(chain, snapshot, workload.sampled)
        sizes = np.ceil(offered)[:, None]  # nodes that there are to select from
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
            float(_forward(snapshot, name, chain[-1], workload, np.array([lag]))[0])
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
        """What is predicted now of an option that was chosen before; None: it is not allowed."""
        wanted = option.shape
        same = np.equal(SHAPE_DEPTHS, wanted.depth) & np.equal(SHAPE_WIDTHS, wanted.width)
        where = np.argwhere(same[:, None] & (self.nodes == wanted.nodes))
        if not len(where):
            return None
        found = self.option(where[0][0], where[0][1])
        return found if np.isfinite(found.ms_per_token) else None

    def option(self, shape: int | np.intp, place: int | np.intp) -> Option:
        """Of a row and a column."""
        return Option(
            self.chain,
            DraftShape(
                int(SHAPE_DEPTHS[shape]), int(SHAPE_WIDTHS[shape]), int(self.nodes[shape, place])
            ),
            float(self.cycle_ms[shape, place]),
            float(self.tokens[shape, place]),
            float(self.ms_per_token[shape, place]),
            float(self.levels_ms[shape, 0]) * self.correction,
            float(self._plain_ms[shape, place]),
            float(self._plain_tokens[shape, place]),
            self.workload.sampled,
        )

    def _allowed(self, limits: Limits) -> NDArray[np.bool_]:
        """[O]"""
        # A shape may stand for a depth that lies below its own, which is then what is drafted.
        depths = np.minimum(SHAPE_DEPTHS, limits.depth or MAX_DEPTH)
        allowed = depths <= limits.max_depth
        if limits.depth is not None:
            allowed &= _least_at_least(SHAPE_DEPTHS, limits.depth)
        if limits.width is not None and allowed.any():  # as wide as a tree of that depth may be
            allowed &= _least_at_least(SHAPE_WIDTHS, limits.width, allowed)
        return np.asarray(allowed)

    @cached_property
    def menu(self) -> "Menu":
        """The options that may be the best for some cycle: of as many nodes, none is both faster to
        draft and better than another."""
        rows, columns = np.nonzero(self.allowed)
        nodes, tokens = self.nodes[rows, columns], self.tokens[rows, columns]
        levels_ms = self.levels_ms[rows, 0]
        order = np.lexsort((-tokens, levels_ms, nodes))
        nodes, tokens, levels_ms = nodes[order], tokens[order], levels_ms[order]
        # Within a number of nodes, from the cheapest on: only what beats all cheaper ones stays.
        ahead = nodes * float(MAX_TREE_TOKENS + 1)
        best_before = np.maximum.accumulate(np.concatenate(([-1.0], (ahead + tokens)[:-1])))
        kept = ahead + tokens > best_before + 1e-3
        return Menu(
            rows[order][kept], columns[order][kept], nodes[kept], tokens[kept], levels_ms[kept]
        )

    def _find_levels_ms(self, snapshot: PerformanceSnapshot, workload: Workload) -> Floats:
        """[O, 1] all that comes before the target."""
        batch, target = workload.requests, self.chain[-1]
        drafting = self._drafter_ms(snapshot, workload)
        total = np.zeros(len(SHAPE_NODES))
        for index, name in enumerate(self.chain[1:-1], start=1):
            prefix = self.chain[:index]
            _, offered = _offer((*prefix, name), snapshot, workload.sampled)
            places = batch * (1 + offered)
            judging = _forward(snapshot, name, target, workload, places)
            total += judging + _stage(snapshot, "verify", places)
        total += drafting + _drafting_ms(snapshot, workload.batch)
        return np.asarray(total)[:, None]

    def _drafter_ms(self, snapshot: PerformanceSnapshot, workload: Workload) -> Floats:
        """[O] of the drafter's steps."""
        name, target = self.chain[0], self.chain[-1]
        wide = workload.requests * SHAPE_WIDTHS
        step = _forward(snapshot, name, target, workload, wide)
        if not snapshot.parameters.get(name, 1):  # its steps are all alike, and rank nothing
            return np.asarray(SHAPE_DEPTHS * step)
        first = np.full(1, workload.requests * _STEADY_LAG)
        return np.asarray(
            _forward(snapshot, name, target, workload, first)
            + (SHAPE_DEPTHS - 1) * step
            + SHAPE_DEPTHS * _stage(snapshot, "draft", wide)
        )

    def _target_ms(self, snapshot: PerformanceSnapshot, workload: Workload) -> Floats:
        """[O, G], or [1, G] where it is the same for all shapes."""
        target, requests, batch = self.chain[-1], workload.requests, workload.batch
        if not self._is_open:
            return verification_ms(snapshot, workload, target, batch + requests * self.nodes)
        key = (target, requests, batch, workload.slots)
        if key not in snapshot.target_ms:  # all chains of a decision ask for it
            places = batch + (requests * _NODES)[None, :]
            snapshot.target_ms[key] = verification_ms(snapshot, workload, target, places)
        return snapshot.target_ms[key]


def verification_ms(
    snapshot: PerformanceSnapshot,
    workload: Workload,
    target: str,
    places: Ints,
    prompt_tokens: int = 0,
    requests: Ints | None = None,
) -> Floats:
    """Time of the target's pass over `places` tokens that are judged and those of prompts, and of
    the work around it.

    Args:
        requests: whose tokens they are, where that differs; in a shape that broadcasts.
    """
    batch = np.full(1, workload.batch) if requests is None else requests
    packed = (places + prompt_tokens).astype(np.float64)
    attended = (packed + READING_QUERIES * batch) * workload.slots
    return np.asarray(
        curve_of(snapshot, target, target).many(packed, attended)
        + _stage(snapshot, "verify", places)
        + _stage(snapshot, "cycle", batch)
    )


def predict_paper(chain: Chain, snapshot: PerformanceSnapshot, depth: int) -> float:
    """Equation 7 as published: W * T_1, then W * T_j times the chance that level j is reached.

    Expected tokens: those that every level accepts, plus the target's own. T_i is one moving
    average, whatever the size of the forwards; of an untried model it goes by the parameters.
    """
    target = chain[-1]
    times = [snapshot.means_ms.get(name, curve_of(snapshot, name, target).at(1)) for name in chain]
    if len(chain) == 1:
        return times[0]
    cost, reached, alpha = depth * times[0], 1.0, 1.0
    for index in range(1, len(chain)):
        cost += depth * times[index] * reached
        step = similarity_to_acceptance(_similarity(chain[index - 1], chain[index], snapshot))
        alpha *= step
        reached *= step
    return cost / (expected_accepted(alpha, depth) + 1)


def expected_accepted(alpha: float, offered: float) -> float:
    """`alpha + alpha^2 + ... + alpha^offered`; `offered` need not be whole."""
    if alpha >= 1.0:
        return offered
    return float(alpha * (1.0 - alpha**offered) / (1.0 - alpha))


def similarity_to_acceptance(similarity: float) -> float:
    """(1 - TV) / (1 + TV), the acceptance that shared noise guarantees (arXiv 2408.07978)."""
    return similarity / (2.0 - similarity)


def acceptance_rate(
    proposers: Chain, verifier: str, snapshot: PerformanceSnapshot, sampled: Mode = True
) -> float:
    """Of the best draft token whose parent was accepted, on the text of now: as observed of these
    proposers, blended by evidence with what is known of the last of them, or what the similarity
    promises."""
    seen = snapshot.trees.get((proposers, verifier, sampled))
    if len(proposers) > 1:
        return blended_alpha(seen, acceptance_rate(proposers[-1:], verifier, snapshot, sampled))
    prior = snapshot.promised_alpha.get((proposers[0], verifier, sampled), UNTRIED_ALPHA)
    return blended_alpha(seen, prior)


def _offer(chain: Chain, snapshot: PerformanceSnapshot, sampled: Mode) -> tuple[Floats, Floats]:
    """What the last model of a chain is offered: rank rates [O, RANKS], and nodes [O].

    A drafter's tree has depth x width nodes. An intermediate offers, at width 1, the path that it
    accepted and its own next token; in wider trees the drafter's nodes in its own judgement.
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


def forward_ms(
    snapshot: PerformanceSnapshot, name: str, target: str, workload: Workload, tokens: float
) -> float:
    """Of a model over so many tokens of one request, on the machine as it is now; 0 for one
    without weights, which keeps no state."""
    if not snapshot.parameters.get(name, 1):
        return 0.0
    one = Workload(1, workload.slots)
    return snapshot.machine * float(_forward(snapshot, name, target, one, np.array([tokens]))[0])


def _forward(
    snapshot: PerformanceSnapshot,
    name: str,
    target: str,
    workload: Workload,
    tokens: NDArray[np.generic],
) -> Floats:
    curve = curve_of(snapshot, name, target)
    packed = tokens.astype(np.float64)
    return curve.many(packed, (packed + READING_QUERIES * workload.requests) * workload.slots)


def _stage(snapshot: PerformanceSnapshot, stage: str, places: NDArray[np.generic]) -> Floats:
    curve = snapshot.stages.get(stage)
    if curve is None:
        return np.zeros(places.shape)
    return curve.many(places.astype(np.float64), np.zeros(places.shape))


def _drafting_ms(snapshot: PerformanceSnapshot, requests: int) -> float:
    """What the engine's own work takes longer where somebody drafts."""
    batch = np.array([requests])
    more = _stage(snapshot, "drafting", batch) - _stage(snapshot, "cycle", batch)
    return max(0.0, float(more[0]))


def curve_of(snapshot: PerformanceSnapshot, name: str, target: str) -> ForwardTimes:
    """A model's curve; of an untried one the target's, scaled by the number of parameters."""
    known = snapshot.times.get(name)
    if known is not None:
        return known
    reference = snapshot.times.get(target, TimeCurve(((1, 1.0),)))
    if name == target:
        return reference
    share = snapshot.parameters[name] / max(1, snapshot.parameters[target])
    return reference.scaled(max(share, _UNTRIED_SPEED))


def _similarity(proposer: str, verifier: str, snapshot: PerformanceSnapshot) -> float:
    untried = 2 * UNTRIED_ALPHA / (1 + UNTRIED_ALPHA)  # inverse of similarity_to_acceptance
    return snapshot.similarity.get((proposer, verifier), untried)


def _least_at_least(
    grid: Ints, wanted: int, among: NDArray[np.bool_] | None = None
) -> NDArray[np.bool_]:
    """The grid's values that stand for one that may lie between them."""
    known = grid if among is None else grid[among]
    above = known[known >= wanted]
    return np.asarray(grid == (above.min() if len(above) else known.max()))
