"""Insertion: which of many new requests could be admitted alone, all of them asked at once.

Whoever could not be is in no set that the dynamic program admits, so it need not look at them.
Pure, on arrays. Source: SLOs-Serve (arXiv 2504.08784), section 3.2.1.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specrouter.profile.batch_time import MOST_TOKENS
from specrouter.slo.serve.admission_dp import PromptDemand, Room
from specrouter.slo.serve.prefill_budget import PrefillBudget

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def left_at_deadlines(prompts: Sequence[PromptDemand], room: Room, budget: PrefillBudget) -> Floats:
    """[P] the prefill budget that is left at each deadline if all are read, which come by rising
    deadline; below 0: it is not in time."""
    return room.begin_tokens + np.cumsum(_gains(prompts, room, budget))


def fits_alone(
    prompts: Sequence[PromptDemand],
    room: Room,
    budget: PrefillBudget,
    ends_ms: Floats,
    tokens: Ints,
    tier: int,
) -> Bools:
    """[N] could each new prompt of a tier, of these deadlines and tokens, be read beside the P
    that are, which come by rising deadline?"""
    reads_ms = np.array([each.deadline_ms for each in prompts], dtype=np.float64)
    since, counts = np.concatenate(([room.begin_ms], reads_ms)), counts_at(prompts, room)
    own = np.eye(len(room.decoding), dtype=np.int64)[tier]
    left = left_at_deadlines(prompts, room, budget)
    before = np.concatenate(([float(room.begin_tokens)], left))  # [P + 1]
    lowest = np.minimum.accumulate(before)
    place = np.searchsorted(reads_ms, ends_ms, side="right")  # of the prompt that comes after
    spans = ends_ms - since[place]
    left = before[place] + budget.over(np.maximum(spans, 0.0), counts[place]) - tokens
    fits = (spans >= 0.0) & (lowest[place] >= 0.0) & (left >= 0.0)
    fits &= bool(budget.holds(counts[-1] + own))
    if not prompts:
        return fits
    # What it leaves for the one after it, and that one for the others.
    after = np.minimum(place, len(prompts) - 1)
    gained = budget.over(np.maximum(reads_ms[after] - ends_ms, 0.0), counts[after] + own)
    then = np.cumsum(_gains(prompts, room, budget, own))
    worst = np.minimum.accumulate(then[::-1])[::-1] - then  # [P] of those behind each, or itself
    needed = np.array([each.tokens for each in prompts])[after]
    found: Bools = fits & ((place > after) | (left + gained - needed + worst[after] >= 0.0))
    return found


def counts_at(prompts: Sequence[PromptDemand], room: Room) -> Ints:
    """[P + 1, L] who decodes before each deadline, and after the last one."""
    tiers = np.array([each.tier for each in prompts], dtype=np.int64)
    joins = np.zeros((len(prompts) + 1, len(room.decoding)), dtype=np.int64)
    joins[np.arange(1, len(prompts) + 1), tiers] = 1
    return np.array(room.decoding) + np.cumsum(joins, axis=0)


def _gains(
    prompts: Sequence[PromptDemand], room: Room, budget: PrefillBudget, others: Ints | int = 0
) -> Floats:
    """[P] what the budget gains from deadline to deadline, beside `others` [L] more. Where those
    who decode are too many it loses more than all prompts together could ever bring back."""
    never = -(float(MOST_TOKENS) ** 2)
    ends = np.array([room.begin_ms, *(each.deadline_ms for each in prompts)])
    spans, tokens = np.diff(ends), np.array([each.tokens for each in prompts])
    found = budget.over(np.maximum(spans, 0.0), counts_at(prompts, room)[:-1] + others) - tokens
    return np.maximum(np.where(spans < 0.0, never, found), never)
