"""The cost model's tree selection: what a cycle is to verify, so that most tokens arrive in time.

A cycle that verifies k draft nodes takes `cost_ms[k]`, read off the target's measured curve T(n),
and brings request i an expected `E_i = 1 + sum of its nodes' worth`. A request with an objective
needs `rate_i * cost_ms[k]` tokens of that cycle to be in time; `rate_i` is what it has left to say
over the time that its objective leaves. Of all budgets k the one is taken that maximises

    sum_i  nearness_i * rate_i * attainable(E_i, need_i)  +  SPARE_TOKEN * E_i / cost_ms[k]

the expected rate of tokens that objectives need, and, for less, of all others: without objectives,
of all tokens. A request's tokens count when all of them came in time, or not at all, so one counts
for more the fewer of them are missing (`nearness`). Within a budget the nodes are selected as in
AdaServe's Algorithm 2, two prefixes of sorted arrays, but cheapest request first: that puts the
most requests on time when the budget does not serve all.

Pure functions on arrays: no clock, no tensors, no loop over nodes or requests.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specrouter.cycle import Candidates
from specrouter.request.params import MAX_TREE_TOKENS

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_HORIZON_TOKENS = 32  # within which a request that fell behind is to be in time again
_HOPELESS = 1.6  # needs beyond so many times what its whole tree may bring are given up
# What a token counts, where one that an objective needs counts 1:
SPARE_TOKEN = 0.3  # of a request that is ahead already, or cannot be saved
THROUGHPUT_TOKEN = 0.5  # of one without an objective
PROMPT_TOKEN = 0.1  # of a prompt, that is read in the same cycle
_NEAREST = 6.0  # times that a token of a request counts at most
_BUDGETS = 24  # that are compared


def demanded_rates(
    decode_ms: Floats, decoded: Ints, remaining: Ints, tpot_ms: Floats, margin: float = 1.2
) -> Floats:
    """[B] tokens per millisecond that bring each request back in time; 0 where `tpot_ms` is NaN.

    What was lost (AdaServe's l and o, section 3) is made good over the next tokens, not at once:
    one slow cycle must not buy nodes of little worth.

    Args:
        decode_ms: since each request's first token.
        decoded: tokens after it.
        remaining: tokens that the request may still gain.
        tpot_ms: the objectives.
        margin: of safety, for cycles that are slower than foreseen.
    """
    left = np.clip(remaining, 1, _HORIZON_TOKENS)
    left_ms = tpot_ms * (decoded + left) - decode_ms
    with np.errstate(divide="ignore"):
        rates = np.where(left_ms > 0.0, margin * left / np.maximum(left_ms, 0.0), np.inf)
    return np.where(np.isnan(tpot_ms), 0.0, rates)


def nearness(decoded: Ints, remaining: Ints) -> Floats:
    """[B] what a token that an objective needs counts: a request's tokens over those to come."""
    left = np.maximum(remaining, 1)
    near: Floats = np.minimum((1 + decoded + left) / left, _NEAREST)
    return near


def attainable(tokens: Floats, needed: Floats) -> Floats:
    """How likely a request is to be in time that gets `tokens` a cycle and needs `needed`.

    `1 / (1 + (needed / tokens)^5)`: half at what is needed, 0.71 at 1.2 times as much. How much
    prompts that are still to come will take is not known.
    """
    ratio = needed / tokens
    share: Floats = 1.0 / (1.0 + ratio * (ratio**2) ** 2)  # powers of 2 are fast
    return share


def is_hopeless(needed: Floats, most_tokens: Floats) -> Bools:
    """Requests that could not be saved by all their nodes: they take part for throughput only."""
    return np.asarray(needed > _HOPELESS * most_tokens)


def value_per_ms(
    tokens: Floats,
    wanted: Floats,
    weights: Floats,
    cycle_ms: Floats,
    near: Floats | float = 1.0,
) -> Floats:
    """Worth of what requests get of a cycle; in shapes that broadcast.

    Args:
        wanted: tokens per millisecond that each needs; 0: nothing that could be attained.
        weights: of any token.
        near: of `nearness`, of those that are needed.
    """
    timely = near * wanted * attainable(tokens, wanted * cycle_ms)
    worth: Floats = timely + weights * tokens / cycle_ms
    return worth


def value(
    tokens: Floats,
    rates: Floats,
    hopeless: Bools,
    cycle_ms: Floats,
    near: Floats | float = 1.0,
) -> Floats:
    """[G, B] worth of a cycle per millisecond, by budget and request.

    Args:
        tokens, hopeless: [G, B]; rates, near: [B]; cycle_ms: [G, 1].
    """
    wanted = np.where(hopeless, 0.0, rates)
    weights = np.where(rates > 0.0, SPARE_TOKEN, THROUGHPUT_TOKEN)
    return value_per_ms(tokens, wanted, weights, cycle_ms, near)


@dataclass(frozen=True, eq=False)
class Choice:
    """Nodes to verify, [B, W], and what is expected of the cycle."""

    chosen: Bools
    nodes: int
    cycle_ms: float


def choose_nodes(
    candidates: Candidates,
    rates: Floats,
    cost_ms: Floats,
    prompt_tokens: int = 0,
    n_max: int = MAX_TREE_TOKENS,
    most: int = MAX_TREE_TOKENS,
    near: Floats | float = 1.0,
) -> Choice:
    """The selection of the best budget.

    Args:
        rates: [B], see `demanded_rates`.
        cost_ms: [K + 1] time of the cycle with 0 to K nodes; K is the largest budget.
        prompt_tokens: that are read in the same cycle.
        n_max: nodes that one request may get towards its objective, before the rest is given by
            worth (AdaServe, section 4.3).
        most: nodes of one tree.
        near: [B] of `nearness`.
    """
    batch = len(rates)
    if not (rates > 0.0).any():
        return _fastest(candidates, cost_ms, prompt_tokens, most)
    gains = candidates.gains[:, :most]
    sums = np.concatenate((np.zeros((batch, 1)), np.cumsum(gains, axis=1)), axis=1)
    count = (gains > 0.0).sum(axis=1)
    budgets = _budgets(min(len(cost_ms) - 1, int(count.sum())))
    needed = rates * cost_ms[budgets][:, None]  # [G, B]
    hopeless = is_hopeless(needed, 1.0 + sums[:, -1])
    taken = _towards_objectives(sums, count, needed, hopeless, budgets, n_max, near)
    taken += _by_worth(gains, taken, budgets - taken.sum(axis=1))
    tokens = 1.0 + sums[np.arange(batch), taken]
    rate = value(tokens, rates, hopeless, cost_ms[budgets][:, None], near).sum(axis=1)
    best = int(np.argmax(rate + PROMPT_TOKEN * prompt_tokens / cost_ms[budgets]))
    nodes = int(taken[best].sum())
    return Choice(candidates.best(taken[best]), nodes, float(cost_ms[nodes]))


def _fastest(candidates: Candidates, cost_ms: Floats, prompt_tokens: int, most: int) -> Choice:
    """Where nobody has an objective: the best nodes of all, as many as bring most tokens per ms."""
    batch, width = candidates.worth.shape
    gains = candidates.gains[:, :most].ravel()
    best = np.argsort(-gains, kind="stable")[: len(cost_ms) - 1]
    best = best[gains[best] > 0.0]
    tokens = batch + np.concatenate(([0.0], np.cumsum(gains[best])))
    weighed = THROUGHPUT_TOKEN * tokens + PROMPT_TOKEN * prompt_tokens
    nodes = int(np.argmax(weighed / cost_ms[: len(tokens)]))
    counts = np.bincount(best[:nodes] // max(1, min(width, most)), minlength=batch)
    return Choice(candidates.best(counts), nodes, float(cost_ms[nodes]))


def _budgets(most: int) -> Ints:
    """[G] rising, from 0 to `most`; all of them where there are few."""
    if most < _BUDGETS:
        return np.arange(most + 1)
    steps = np.rint(np.linspace(0.0, 1.0, _BUDGETS) ** 1.5 * most)
    budgets: Ints = np.unique(steps).astype(np.int64)
    return budgets


def _towards_objectives(
    sums: Floats,
    count: Ints,
    needed: Floats,
    hopeless: Bools,
    budgets: Ints,
    n_max: int,
    near: Floats | float,
) -> Ints:
    """[G, B] nodes that each request takes to be in time, while the budget lasts: those first that
    take few of them for what they count."""
    short = 1.0 + sums < needed[:, :, None]  # [G, B, M + 1] still, with so many nodes
    wanted = np.minimum(short.sum(axis=2), np.minimum(count, n_max))
    wanted[hopeless] = 0
    order = np.argsort(wanted / near, axis=1, kind="stable")
    sorted_wanted = np.take_along_axis(wanted, order, axis=1)
    before = np.cumsum(sorted_wanted, axis=1) - sorted_wanted
    granted = np.clip(budgets[:, None] - before, 0, sorted_wanted)
    taken: Ints = np.empty_like(wanted)
    np.put_along_axis(taken, order, granted, axis=1)
    return taken


def _by_worth(gains: Floats, taken: Ints, left: Ints) -> Ints:
    """[G, B] further nodes by global rank, `left` [G] of them."""
    batch, width = gains.shape
    if not width or not left.any():
        return np.zeros_like(taken)
    most = int((left + taken.sum(axis=1)).max())
    flat = gains.ravel()
    best = np.argsort(-flat, kind="stable")[:most]
    best = best[flat[best] > 0.0]
    row, place = np.divmod(best, width)
    free = place >= taken[:, row]  # [G, N]
    free &= np.cumsum(free, axis=1) <= left[:, None]
    budget, node = np.nonzero(free)
    further = np.bincount(budget * batch + row[node], minlength=taken.size)
    return further.reshape(taken.shape)
