"""Strict: SLOs-Serve's pacing, in which every batch is in time, with drafts of a chain.

Batches are those that read most prompt tokens per time. Each prompt ends as late as it may, unless
all others stay in time if its request decodes from now on: a request whose first token comes early
needs the next ones early as well.

Pure. Source: SLOs-Serve (arXiv 2504.08784), sections 3.1 to 3.2.3, Algorithm 1.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from research.policies.admission_dp import (
    MOST_NEW,
    best_set,
    counts_of,
    reads_in_time,
    tier_of,
    tiers_for,
)
from research.policies.prefill_budget import SpeculativeBudget
from specrouter.slo.admission import Admission
from specrouter.slo.serve.load import Load, Prompt, by_deadline
from specrouter.slo.serve.pacing import Batch, Choice, Memory, Pacing
from specrouter.slo.serve.policy import Decision


class Strict(Pacing):
    """The lengths of its batches are binding: the planner drafts as much as they say."""

    def choose(self, load: Load, new: Sequence[Prompt], memory: Memory) -> Choice:
        if not self.is_in_time(load):
            return Choice(in_time=False)
        able = by_deadline(new)[:MOST_NEW]
        if not able:
            return Choice()
        tiers = tiers_for(load, able)
        found = best_set(load, able, memory, tiers, _budget(self, tiers))
        # The tiers were made with prompts that are left out now, and batches are whole numbers: by
        # its own tiers, a set may be slightly too large.
        while found and not self.is_in_time(load.joined(found)):
            found.remove(max(found, key=lambda each: each.tokens))
        return Choice(tuple(found))

    def is_in_time(self, load: Load) -> bool:
        return reads_in_time(load, lambda tiers: _budget(self, tiers))

    def batch(self, load: Load, batch_ms: float) -> Batch:
        tiers = tiers_for(load, ())
        first_ms = min((each.deadline_ms for each in load.prompts), default=math.inf)
        best = _budget(self, tiers).best(np.array(counts_of(load, tiers)), first_ms)
        lengths = np.array(best.lengths)[tier_of(tiers, load.tpot_ms)]
        room = best.tokens - np.cumsum(lengths)
        lengths = np.where(room >= 0, lengths, 0)
        return Batch(ms=best.ms, next_ms=best.ms, tokens=best.tokens, lengths=lengths)


class StrictDecision(Decision):
    """A decision whose batches say how many tokens each request verifies."""

    def _written(self, load: Load, batch: Batch) -> Admission:
        admission, lengths, room = self._shared(load, batch)
        return replace(
            admission,
            paused=frozenset(name for name, length in lengths.items() if not length),
            depths={name: max(0, length - 1) for name, length in lengths.items()},
            budget_nodes=room + sum(max(0, length - 1) for length in lengths.values()),
            budget_ms=batch.ms,
        )


@lru_cache(maxsize=256)
def _budget(pacing: Pacing, tiers_ms: tuple[float, ...]) -> SpeculativeBudget:
    return SpeculativeBudget(
        times=pacing.times,
        tiers_ms=tiers_ms,
        alpha=pacing.alpha,
        idle_ms=pacing.idle_ms,
        margin=pacing.margin,
    )
