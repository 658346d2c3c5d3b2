"""Strict: SLOs-Serve's pacing, in which every batch is in time, with drafts of a chain.

Batches are those that read most prompt tokens per time. Each prompt ends as late as it may, unless
all others stay in time if its request decodes from now on: a request whose first token comes early
needs the next ones early as well.

Pure. Source: SLOs-Serve (arXiv 2504.08784), sections 3.1 to 3.2.3, Algorithm 1.
"""

import math
from abc import abstractmethod
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
from specrouter.slo.serve.load import EPS_MS, Bools, Load, Prompt, by_deadline
from specrouter.slo.serve.pacing import Batch, Choice, Memory, Pacing
from specrouter.slo.serve.policy import Decision


class StrictPacing(Pacing):
    """Pacing whose batches hold back prompts that would end in them too early."""

    @abstractmethod
    def is_in_time(self, load: Load) -> bool:
        """Return whether all that are admitted attain their objectives."""

    def with_prompts(self, load: Load, batch: Batch, next_ms: float) -> Batch:
        """Return the batch with chunks of the load's prompts, by deadline.

        Prompts that could end in it and need not yet are held one token before their end, so long
        as their requests would decode too early for the others. `next_ms`: most time of the batch
        after this one.
        """
        room = batch.tokens - int(batch.lengths.sum())
        chunks = []
        for prompt in load.prompts:
            may_wait = prompt.deadline_ms >= batch.ms + next_ms - EPS_MS
            holds = may_wait and math.isfinite(prompt.tpot_ms)
            chunk = max(0, min(room, prompt.tokens - holds))
            room -= chunk
            chunks.append(chunk)
            if chunk == prompt.tokens:
                next_ms = min(next_ms, prompt.tpot_ms)
        served = batch.lengths > 0
        for place, prompt in enumerate(load.prompts):
            if room and chunks[place] == prompt.tokens - 1:
                chunks[place] += 1
                if self.is_in_time(after(load, batch.ms, served, chunks)):
                    room -= 1
                else:
                    chunks[place] -= 1
        return replace(batch, chunks=tuple(chunks), room=room)


class Strict(StrictPacing):
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

    def batch(self, load: Load, choice: Choice) -> Batch:
        tiers = tiers_for(load, ())
        first_ms = min((each.deadline_ms for each in load.prompts), default=math.inf)
        best = _budget(self, tiers).best(np.array(counts_of(load, tiers)), first_ms)
        lengths = np.array(best.lengths)[tier_of(tiers, load.tpot_ms)]
        room = best.tokens - np.cumsum(lengths)
        lengths = np.where(room >= 0, lengths, 0)
        batch = Batch(ms=best.ms, tokens=best.tokens, lengths=lengths)
        return self.with_prompts(load, batch, best.ms)


class StrictDecision(Decision):
    """A decision whose batches say how many tokens each request verifies."""

    def written(self, load: Load, batch: Batch) -> Admission:
        admission, lengths, room = self.shared(load, batch)
        return replace(
            admission,
            paused=frozenset(name for name, length in lengths.items() if not length),
            depths={name: max(0, length - 1) for name, length in lengths.items()},
            budget_nodes=room + sum(max(0, length - 1) for length in lengths.values()),
            budget_ms=batch.ms,
        )


def after(load: Load, batch_ms: float, served: Bools, chunks: Sequence[int]) -> Load:
    """Return the load after a batch that serves `served` [R] and reads these `chunks`."""
    due = load.due_ms - batch_ms + np.where(served, load.tpot_ms, 0.0)
    ids, paces, rest, left = list(load.ids), list[float](), list[float](), list[Prompt]()
    for prompt, chunk in zip(load.prompts, chunks, strict=True):
        if chunk < prompt.tokens:
            deadline_ms = prompt.deadline_ms - batch_ms
            left.append(replace(prompt, deadline_ms=deadline_ms, tokens=prompt.tokens - chunk))
        elif math.isfinite(prompt.tpot_ms):
            ids.append(prompt.id)
            paces.append(prompt.tpot_ms)
            rest.append(prompt.left)
    return Load(
        ids=tuple(ids),
        due_ms=np.concatenate((due, paces)),
        tpot_ms=np.concatenate((load.tpot_ms, paces)),
        left=np.concatenate((load.left, rest)),
        prompts=tuple(left),
        others=load.others,
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
