"""What the dynamic program is asked of a load, and what it answers. Pure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specrouter.slo.serve.admission_dp import PromptDemand, Room, most_admitted
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
    prompts = [each.tpot_ms for each in (*load.prompts, *new)]
    return tiers_of(np.concatenate((load.tpot_ms, prompts)))


def counts_of(load: Load, tiers_ms: Sequence[float]) -> list[int]:
    """Of each tier that decode now."""
    found = np.bincount(tier_of(tiers_ms, load.tpot_ms), minlength=len(tiers_ms))
    return [int(each) for each in found]


def reads_in_time(load: Load, budget_of: BudgetOf) -> bool:
    """Are all prompts of the load in time, and can all decode afterwards?"""
    tiers = tiers_for(load, ())
    read, budget = demands_of(load.prompts, tiers), budget_of(tiers)
    joins = np.zeros((len(read) + 1, len(tiers)), dtype=np.int64)
    joins[1:] = np.eye(len(tiers), dtype=np.int64)[[each.tier for each in read]]
    decoding = np.array(counts_of(load, tiers)) + np.cumsum(joins, axis=0)  # before each deadline
    spans = np.diff([0.0, *(each.deadline_ms for each in read)])
    gained = np.where(spans < 0.0, -np.inf, budget.over(np.maximum(spans, 0.0), decoding[:-1]))
    left = np.cumsum(gained - [each.tokens for each in read])
    return bool((left >= 0.0).all() and budget.holds(decoding[-1]))


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
) -> list[Prompt]:
    """By the dynamic program."""
    prompts = load.joined(new).prompts
    unit = math.inf if memory.tokens is None else max(1.0, memory.tokens / _UNITS)
    units = 0 if memory.tokens is None else math.floor(memory.tokens / unit)
    room = Room(tuple(counts_of(load, tiers_ms)), units, memory.rows)
    found = most_admitted(demands_of(prompts, tiers_ms, unit), room, budget)
    return [prompts[place] for place in found or ()]
