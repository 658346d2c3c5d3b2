"""Pacing: the requests to admit, and the next batch, so that no admitted one misses its objective.

Batches are those that read most prompt tokens per time. Each prompt ends as late as it may, unless
all others stay in time if its request decodes from now on: a request whose first token comes early
needs the next ones early as well.

Pure. Source: SLOs-Serve (arXiv 2504.08784), sections 3.1 to 3.2.3, Algorithm 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from specrouter.profile.batch_time import BatchTime, Reserved
from specrouter.slo.serve.admission_dp import (
    MOST_NEW,
    Memory,
    best_set,
    counts_of,
    reads_in_time,
    tiers_for,
)
from specrouter.slo.serve.load import Load, Prompt, by_deadline, tier_of
from specrouter.slo.serve.prefill_budget import MOST_SPECULATED, SpeculativeBudget, accepted

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """The contents and limits of the next batch.

    Attributes:
        ms: most time of the batch; `next_ms`: the same of the one after it.
        tokens: tokens that it may read.
        lengths: [R] tokens that each decoding request of the load verifies; 0: it sits out.
        chunks: tokens of each of the load's prompts.
        room: tokens that are left for others.
        longest_ms: most time of the cycle with any drafts of the planner; None: unbounded.
        spare: requests without an objective that may decode in it at most; None: all.
        paces_decoding: `lengths` are binding, even if decoding is left to the planner otherwise.
    """

    ms: float
    next_ms: float
    tokens: int
    lengths: Ints
    chunks: tuple[int, ...] = ()
    room: int = 0
    longest_ms: float | None = None
    spare: int | None = None
    paces_decoding: bool = False


@dataclass(frozen=True)
class Choice:
    """The result of a decision on new requests.

    Attributes:
        admitted: the new ones that are admitted.
        batch_ms: time of batches, where that is chosen.
        in_time: those admitted before stay in time, except the `given_up` neediest.
    """

    admitted: tuple[Prompt, ...] = ()
    batch_ms: float = 0.0
    in_time: bool = True
    given_up: int = 0


@dataclass(frozen=True)
class Pacing:
    """The pacing by the times of one machine.

    Attributes:
        times: times of batches.
        idle_ms: most time of a batch while no request with an objective decodes.
        alpha: chance that a drafted token is accepted, given that the one before it is; 0: no
            drafts.
        margin: share of every TPOT that is kept back, since `alpha` is only a mean.
        leaves_decoding: it paces prompts only, and the planner chooses how requests decode.
    """

    times: BatchTime
    idle_ms: float
    alpha: float = 0.0
    margin: float = 0.0
    leaves_decoding: ClassVar[bool] = False

    @cached_property
    def reach(self) -> tuple[float, ...]:
        """The mean tokens from verifying 1, 2, 3, ... of a request, its root included."""
        most = MOST_SPECULATED if self.alpha else 1
        return tuple(accepted(self.alpha, np.arange(1, most + 1)).tolist())

    @cached_property
    def fastest_ms(self) -> float:
        """The TPOT of a request alone."""
        found = enumerate(self.reach)
        return min(self.times.ms(drafted + 1, drafted) / tokens for drafted, tokens in found)

    @property
    def promised_ms(self) -> float:
        """The least TPOT that is promised to a request."""
        return self.fastest_ms / (1.0 - self.kept_back)

    @property
    def kept_back(self) -> float:
        """The share of every TPOT that is kept back."""
        return self.margin if self.alpha else 0.0

    def beside(self, tokens: int) -> Self:
        """Return the pacing if so many tokens of every batch belong to others."""
        return replace(self, times=Reserved(self.times, tokens))

    def choose(self, load: Load, new: Sequence[Prompt], memory: Memory) -> Choice:
        """Choose the new prompts to admit; `in_time`: those admitted before stay in time."""
        if not self.keeps_all(load):
            return Choice(in_time=False)
        able = by_deadline(new)[:MOST_NEW]
        if not able:
            return Choice()
        tiers = tiers_for(load, able)
        found = best_set(load, able, memory, tiers, self._budget(tiers))
        # The tiers were made with prompts that are left out now, and batches are whole numbers: by
        # its own tiers, a set may be slightly too large.
        while found and not self.keeps_all(load.joined(found)):
            found.remove(max(found, key=lambda each: each.tokens))
        return Choice(tuple(found))

    def keeps_all(self, load: Load) -> bool:
        """Return whether such batches keep all that are admitted in time."""
        return reads_in_time(load, self._budget)

    def is_in_time(self, load: Load) -> bool:
        """Return whether all that are admitted attain their objectives."""
        return self.keeps_all(load)

    def batch(self, load: Load, batch_ms: float) -> Batch:
        """Return the next batch, without its prompts."""
        tiers = tiers_for(load, ())
        first_ms = min((each.deadline_ms for each in load.prompts), default=math.inf)
        best = self._budget(tiers).best(np.array(counts_of(load, tiers)), first_ms)
        lengths = np.array(best.lengths)[tier_of(tiers, load.tpot_ms)]
        room = best.tokens - np.cumsum(lengths)
        lengths = np.where(room >= 0, lengths, 0)
        return Batch(ms=best.ms, next_ms=best.ms, tokens=best.tokens, lengths=lengths)

    def reserved(self, load: Load, batch: Batch) -> Batch:
        """Return the next batch with its prompts, bounded so that promises hold after it."""
        return batch

    def _budget(self, tiers_ms: tuple[float, ...]) -> SpeculativeBudget:
        return _budget(self, tiers_ms)


@lru_cache(maxsize=256)
def _budget(pacing: Pacing, tiers_ms: tuple[float, ...]) -> SpeculativeBudget:
    return SpeculativeBudget(
        times=pacing.times,
        tiers_ms=tiers_ms,
        alpha=pacing.alpha,
        idle_ms=pacing.idle_ms,
        margin=pacing.kept_back,
    )
