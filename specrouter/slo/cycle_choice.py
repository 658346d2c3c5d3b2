"""What one cycle does: which requests take part, and how large their drafts are.

The expected value of a cycle per millisecond is compared for several numbers of requests that take
part and every shape of drafts:

    sum over requests of  near_i * rate_i * attainable(E_i, rate_i * t)  +  SPARE_TOKEN * E_i / t

`t` is what the cycle takes by the measured curves, `E_i` what a request gains in it, `rate_i` the
tokens per millisecond that it needs to be in time, `near_i` what such a token counts, which is more
the nearer the request is to its end. A token in itself counts less: that of a request
without an objective more than that of one that is ahead, or that cannot be saved. A prompt token
that is read counts too, so that large trees do not delay first tokens, and so does a token of every
request that decodes in the same pass and is routed otherwise.

A request that cannot be saved (AdaServe's n_max only limits what it takes) or is worth less than
the delay that it causes the others sits out, for at most `LONGEST_WAIT` cycles in a row: its row
costs a cycle about as much as a drafted token. Requests that are ahead of their objective always
take part: what they are ahead is what they have against the next long prompt.

Pure functions on arrays: no clock, no tensors.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specrouter.profile.prediction import Option, OptionGrid, verification_ms
from specrouter.profile.snapshot import PerformanceSnapshot, outcome_of
from specrouter.slo.cost_model import (
    PROMPT_TOKEN,
    SPARE_TOKEN,
    THROUGHPUT_TOKEN,
    value_per_ms,
)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

LONGEST_WAIT = 32  # cycles in a row that a request may sit out
_URGENT = 0.9  # tokens of a cycle without drafts, beyond which a request depends on drafts
_MOST_TOKENS = 3.5  # needs beyond so many tokens of a cycle without drafts are given up
_FASTER = 1.03  # by which drafting must be better than not
_COUNTS = 5  # numbers of requests that are compared
_BINS = 4  # of urgent requests by their rates
_MOST_NODES = 16  # of a tree in the mean


@dataclass(frozen=True, eq=False)
class CycleChoice:
    """`active` [B]: who takes part. `option` None: nobody drafts."""

    active: Bools
    option: Option | None
    value: float  # per millisecond


@dataclass(frozen=True, eq=False)
class _Crowds:
    """Requests of about the same needs, K crowds of them."""

    rates: Floats  # [K] tokens per millisecond that each request needs; 0: nothing to attain
    near: Floats  # [K] what such a token counts
    weights: Floats  # [K] of any token
    counts: Ints  # [K, M] requests that take part, for each of the numbers that are compared


@dataclass(frozen=True, eq=False)
class _Drafts:
    """What may be drafted, [E] each; the first of them is nothing."""

    entries: NDArray[np.intp]  # [E - 1] in the grid's menu, of all but the first
    nodes: Ints
    tokens: Floats
    levels_ms: Floats


def choose_cycle(
    snapshot: PerformanceSnapshot,
    grid: OptionGrid,
    rates: Floats,
    waited: Ints,
    prompt_tokens: int,
    others: int = 0,
    reading_ms: float = 0.0,
    catch_up_ms: float = 0.0,
    near: Floats | None = None,
) -> CycleChoice:
    """The best cycle for B requests whose drafts the grid predicts.

    Args:
        rates: [B] of `demanded_rates`.
        waited: [B] cycles in a row that each has sat out.
        prompt_tokens: that the target reads in the same pass.
        others: requests beside them, that decode in the same pass.
        reading_ms: that drafters need in the same cycle to read texts, for drafts of later ones.
        catch_up_ms: that they need for the drafts of this one, if there are to be any.
        near: [B] of `nearness`; None: a needed token of any request counts the same.
    """
    count, target = len(rates), grid.chain[-1]
    everyone = np.full(1, count + others)
    plain_ms = verification_ms(snapshot, grid.workload, target, everyone, prompt_tokens, everyone)
    needed = rates * (snapshot.machine * plain_ms[0] + reading_ms)
    lost = needed > _MOST_TOKENS
    urgent = (needed > _URGENT) & ~lost
    order = _service_order(rates, urgent, lost, waited)
    always = (~lost & ~urgent & (rates > 0.0)) | (waited >= LONGEST_WAIT)
    active = _numbers(max(1, int(always.sum())), count, lost, rates)
    nearby = np.ones(count) if near is None else near
    crowds = _crowds(rates[order], nearby[order], urgent[order], lost[order], active)

    drafts = _drafts(grid)
    drafting = np.stack((active, crowds.counts[:_BINS].sum(axis=0)), axis=1)  # [M, 2] all; urgent
    cycle_ms = _cycle_ms(snapshot, grid, drafts, active, drafting, prompt_tokens, others)
    cycle_ms += reading_ms + np.where(drafts.nodes > 0, catch_up_ms, 0.0)
    beside = (PROMPT_TOKEN * prompt_tokens + THROUGHPUT_TOKEN * others) / cycle_ms
    value = _value(crowds, drafts.tokens, cycle_ms) + beside
    # Drafts that nobody shares in are none.
    value = np.where((drafting[:, :, None] > 0) | (drafts.nodes == 0), value, -np.inf)
    row, sharing, entry = best = _best(value, beside)
    taking = np.zeros(count, dtype=np.bool_)
    taking[order[: active[row]]] = True
    option = None
    if entry:
        share = float(drafting[row, sharing] / active[row])
        option = _option(grid, drafts.entries[entry - 1], share, float(cycle_ms[best]))
        predicted = grid.workload.requests, grid.workload.others
        if prompt_tokens or share < 1.0 or (active[row], others) != predicted:
            option = replace(option, plain_ms=0.0)  # not what outcomes are about
    return CycleChoice(taking, option, float(value[best]))


def _drafts(grid: OptionGrid) -> _Drafts:
    menu = grid.menu
    few = np.flatnonzero(menu.nodes <= _MOST_NODES)
    return _Drafts(
        few,
        np.concatenate(([0], menu.nodes[few])),
        np.concatenate(([1.0], menu.tokens[few])),
        np.concatenate(([0.0], menu.levels_ms[few])),
    )


def _cycle_ms(
    snapshot: PerformanceSnapshot,
    grid: OptionGrid,
    drafts: _Drafts,
    active: Ints,
    drafting: Ints,
    prompt_tokens: int,
    others: int,
) -> Floats:
    """[M, 2, E] where `active` [M] requests take part, of whom `drafting` [M, 2] draft."""
    target, workload = grid.chain[-1], grid.workload
    scale = 0.5 + 0.5 * active / workload.requests
    levels_ms = scale[:, None, None] * drafts.levels_ms
    batch = (active + others)[:, None, None]
    places = batch + drafting[:, :, None] * drafts.nodes
    target_ms = verification_ms(snapshot, workload, target, places, prompt_tokens, batch)
    plain = outcome_of(snapshot, (target,), workload.batch, workload.sampled).time
    correction = np.where(drafts.nodes > 0, grid.correction, plain)
    cycle_ms: Floats = snapshot.machine * correction * (levels_ms + target_ms)
    return cycle_ms


def _best(value: Floats, beside: Floats) -> tuple[int, int, int]:
    """Where in [M, 2, E] the value is largest; drafts must be better than none by a margin.

    `beside`: what of it prompts and others bring, who have their tokens either way.
    """
    undrafted = np.unravel_index(np.argmax(value[:, :, 0]), value.shape[:2])
    best = np.unravel_index(np.argmax(value), value.shape)
    same = beside[*undrafted, 0]
    if value[best] - same <= _FASTER * (value[*undrafted, 0] - same):
        best = (*undrafted, np.intp(0))
    row, sharing, entry = (int(index) for index in best)
    return row, sharing, entry


def _option(grid: OptionGrid, at: np.intp, share: float, cycle_ms: float) -> Option:
    """Of the menu; `share` of those who take part draft, and `nodes` is the mean over all."""
    found = grid.option(grid.menu.rows[at], grid.menu.columns[at])
    return replace(found, cycle_ms=cycle_ms, nodes=max(1, round(found.nodes * share)))


def _service_order(rates: Floats, urgent: Bools, lost: Bools, waited: Ints) -> Ints:
    """Who takes part first: who waited too long, who is ahead, the urgent from the one that needs
    least on, who has no objective, who cannot be saved."""
    tier = np.where(urgent, 2, np.where(lost, 4, np.where(rates == 0.0, 3, 1)))
    tier[waited >= LONGEST_WAIT] = 0
    return np.lexsort((np.where(np.isfinite(rates), rates, 0.0), tier))


def _numbers(least: int, count: int, lost: Bools, rates: Floats) -> Ints:
    """[M] numbers of requests that may take part, falling."""
    if not (rates > 0.0).any():
        return np.array([count])
    steps = np.rint(np.linspace(least, count, _COUNTS)).astype(np.int64)
    savable = max(least, count - int(lost.sum()))
    return np.unique(np.append(steps, savable))[::-1]


def _crowds(rates: Floats, near: Floats, urgent: Bools, lost: Bools, active: Ints) -> _Crowds:
    """Of requests in the order of service: `_BINS` urgent crowds, those ahead, lost, and free."""
    free = rates == 0.0
    place = np.cumsum(urgent) - 1
    bins = np.minimum(place * _BINS // max(1, int(urgent.sum())), _BINS - 1)
    others = np.where(lost, _BINS + 1, np.where(free, _BINS + 2, _BINS))
    crowd = np.where(urgent, bins, others)
    member = crowd[:, None] == np.arange(_BINS + 3)  # [B, K]
    counts = np.cumsum(member, axis=0)[active - 1].T
    wanted = np.where(lost | free, 0.0, rates)
    sums = (wanted[:, None] * member).sum(axis=0)
    means = sums / np.maximum(member.sum(axis=0), 1)
    nearby = ((near * wanted)[:, None] * member).sum(axis=0) / np.where(sums > 0.0, sums, 1.0)
    weights = np.full(_BINS + 3, SPARE_TOKEN)
    weights[-1] = THROUGHPUT_TOKEN
    return _Crowds(means, nearby, weights, counts)


def _value(crowds: _Crowds, tokens: Floats, cycle_ms: Floats) -> Floats:
    """[M, 2, E] per millisecond; tokens [E] of who drafts, which are all, or the urgent only."""
    gained = np.ones((len(crowds.rates), 1, 2, len(tokens)))
    gained[:, :, 0] = tokens
    gained[:_BINS, :, 1] = tokens
    rates, near, weights = (
        each[:, None, None, None] for each in (crowds.rates, crowds.near, crowds.weights)
    )
    each = value_per_ms(gained, rates, weights, cycle_ms, near)
    value: Floats = (crowds.counts[:, :, None, None] * each).sum(axis=0)
    return value
