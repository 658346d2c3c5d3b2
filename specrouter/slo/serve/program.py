"""What the dynamic program is asked of a load, and what it answers. Pure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specrouter.slo.serve.admission_dp import PromptDemand, Room, most_admitted
from specrouter.slo.serve.insertion import counts_at, fits_alone, left_at_deadlines
from specrouter.slo.serve.load import Load, Prompt, tier_of, tiers_of
from specrouter.slo.serve.prefill_budget import PrefillBudget

BudgetOf = Callable[[tuple[float, ...]], PrefillBudget]  # of these tiers

MOST_NEW = 10  # requests that one decision chooses among
_UNITS = 48  # of memory that a decision counts with


@dataclass(frozen=True)
class Memory:
    """What new requests may take. `tokens` of KV, None: without bound."""

    rows: int
    tokens: int | None = None

    def holds(self, prompts: Sequence[Prompt]) -> bool:
        tokens = sum(each.reserve_tokens for each in prompts)
        return len(prompts) <= self.rows and (self.tokens is None or tokens <= self.tokens)


def tiers_for(load: Load, new: Sequence[Prompt]) -> tuple[float, ...]:
    return _tiers_with(load, [each.tpot_ms for each in new])


def _tiers_with(load: Load, paces_ms: Sequence[float]) -> tuple[float, ...]:
    prompts = [each.tpot_ms for each in load.prompts]
    return tiers_of(np.concatenate((load.tpot_ms, prompts, paces_ms)))


def counts_of(load: Load, tiers_ms: Sequence[float]) -> list[int]:
    """Of each tier that decode now."""
    found = np.bincount(tier_of(tiers_ms, load.tpot_ms), minlength=len(tiers_ms))
    return [int(each) for each in found]


def reads_in_time(load: Load, budget_of: BudgetOf) -> bool:
    """Are all prompts of the load in time, and can all decode afterwards?"""
    tiers = tiers_for(load, ())
    read, room, budget = (
        demands_of(load.prompts, tiers),
        Room(tuple(counts_of(load, tiers))),
        budget_of(tiers),
    )
    left = left_at_deadlines(read, room, budget)
    return bool((left >= 0.0).all() and budget.holds(counts_at(read, room)[-1]))


def able_alone(
    load: Load, new: Sequence[Prompt], budget_of: BudgetOf, begin: tuple[float, int] = (0.0, 0)
) -> list[Prompt]:
    """Those that the program would admit if they came alone, by rising deadline: each is judged by
    the tiers that there are with its own, or, where many differ, with one that stands for it."""
    new = sorted(new, key=lambda each: each.deadline_ms)
    paces = tiers_of([each.tpot_ms for each in new])
    stands = tier_of(paces, np.array([each.tpot_ms for each in new]))
    found = np.zeros(len(new), dtype=np.bool_)
    for place in set(stands.tolist()):
        those = np.flatnonzero(stands == place)
        tiers = _tiers_with(load, paces[place : place + 1])
        ends = np.array([new[each].deadline_ms for each in those])
        tokens = np.array([new[each].tokens for each in those])
        tier = int(tier_of(tiers, paces[place]))
        room = Room(tuple(counts_of(load, tiers)), begin_ms=begin[0], begin_tokens=begin[1])
        read = demands_of(load.prompts, tiers)
        found[those] = fits_alone(read, room, budget_of(tiers), ends, tokens, tier)
    return [each for each, fits in zip(new, found.tolist(), strict=True) if fits]


def demands_of(
    prompts: Sequence[Prompt], tiers_ms: Sequence[float], unit: float = math.inf
) -> list[PromptDemand]:
    paces = np.array([each.tpot_ms for each in prompts], dtype=np.float64)
    return [
        PromptDemand(
            each.deadline_ms,
            each.tokens,
            tier,
            0 if each.is_running else math.ceil(each.reserve_tokens / unit),
            each.is_running,
        )
        for each, tier in zip(prompts, tier_of(tiers_ms, paces).tolist(), strict=True)
    ]


def best_set(
    load: Load,
    new: Sequence[Prompt],
    memory: Memory,
    tiers_ms: tuple[float, ...],
    budget: PrefillBudget,
    begin: tuple[float, int] = (0.0, 0),
) -> list[Prompt]:
    """By the dynamic program."""
    prompts = load.joined(new).prompts
    unit = math.inf if memory.tokens is None else max(1.0, memory.tokens / _UNITS)
    units = 0 if memory.tokens is None else math.floor(memory.tokens / unit)
    room = Room(tuple(counts_of(load, tiers_ms)), units, memory.rows, *begin)
    found = most_admitted(demands_of(prompts, tiers_ms, unit), room, budget)
    return [prompts[place] for place in found or ()]
