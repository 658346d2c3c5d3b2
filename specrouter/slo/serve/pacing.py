"""Pacing: who is admitted, and what the next batch is, so that nobody admitted misses an objective.

Two ways to decode, with the same questions: `Autoregressive` and `Speculative`. Each prompt ends as
late as it may, unless all others stay in time if its request decodes from now on: whose first token
comes early is to be given the next ones early as well.

Pure. Source: SLOs-Serve (arXiv 2504.08784), sections 3.1 to 3.2.3, Algorithms 1 and 2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from specrouter.profile.batch_time import BatchTime, Reserved
from specrouter.slo.serve.load import (
    EPS_MS,
    Load,
    Prompt,
    by_deadline,
    first_batch_ms,
    leaves_nobody_late,
    tier_of,
    tiers_of,
)
from specrouter.slo.serve.prefill_budget import AutoregressiveBudget, SpeculativeBudget, chain_reach
from specrouter.slo.serve.program import (
    MOST_NEW,
    Memory,
    best_set,
    counts_of,
    reads_in_time,
    tiers_for,
)

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """What the next batch is given.

    Attributes:
        ms: that it may take; `next_ms`: the one after it.
        tokens: that it may read; `steps`: of drafting.
        lengths: [R] tokens that each decoding request of the load verifies; 0: it sits out.
        chunks: tokens of each of the load's prompts.
        room: tokens that are left for others.
        longest_ms: that the cycle may take, whatever the planner drafts; None: without bound.
        spare: of those who decode without an objective, as many as may take part; None: all.
        paces_decoding: `lengths` are kept to, also where decoding is left to the planner otherwise.
    """

    ms: float
    next_ms: float
    tokens: int
    steps: int
    lengths: Ints
    chunks: tuple[int, ...] = ()
    room: int = 0
    longest_ms: float | None = None
    spare: int | None = None
    paces_decoding: bool = False


@dataclass(frozen=True)
class Choice:
    """Attributes:
    admitted: of the new ones.
    batch_ms: what batches take, where that is chosen.
    in_time: those admitted before stay in time, but for the `given_up` neediest.
    """

    admitted: tuple[Prompt, ...] = ()
    batch_ms: float = 0.0
    in_time: bool = True
    given_up: int = 0


class Pacing(Protocol):
    """Attributes:
    times: of batches.
    reach: tokens that verifying 1, 2, 3, ... of a request brings in the mean, its root included.
    fastest_ms: TPOT of a request alone; `promised_ms`: the least that is promised to one.
    leaves_decoding: it paces prompts only, and the planner chooses how requests decode.
    """

    leaves_decoding: ClassVar[bool]

    @property
    def times(self) -> BatchTime: ...
    @property
    def reach(self) -> tuple[float, ...]: ...
    @property
    def fastest_ms(self) -> float: ...
    @property
    def promised_ms(self) -> float: ...

    def beside(self, tokens: int) -> "Pacing":
        """The same where so many tokens of every batch are others'."""

    def choose(self, load: Load, new: Sequence[Prompt], memory: Memory) -> Choice:
        """Who of the new ones is admitted; `in_time`: those admitted before stay in time."""

    def is_in_time(self, load: Load) -> bool:
        """Do all that are admitted attain their objectives?"""

    def batch(self, load: Load, batch_ms: float) -> Batch:
        """The next one, without its prompts."""

    def reserved(self, load: Load, batch: Batch) -> Batch:
        """The next one with its prompts, bounded so that promises hold after it."""


@dataclass(frozen=True)
class _Strict:
    """What both ways have."""

    times: BatchTime
    leaves_decoding: ClassVar[bool] = False

    def beside(self, tokens: int) -> Self:
        return replace(self, times=Reserved(self.times, tokens))

    def reserved(self, load: Load, batch: Batch) -> Batch:
        return batch


@dataclass(frozen=True)
class Autoregressive(_Strict):
    """Batches of the tightest TPOT that decodes, or shorter where only that serves all in time.
    `idle_ms`: what one may take while nobody decodes who has an objective."""

    idle_ms: float
    reach: ClassVar[tuple[float, ...]] = (1.0,)

    @property
    def fastest_ms(self) -> float:
        return self.times.ms(1)

    promised_ms = fastest_ms

    def choose(self, load: Load, new: Sequence[Prompt], memory: Memory) -> Choice:
        lengths = self._batch_lengths(load, new)
        found = [each for each in lengths if leaves_nobody_late(load, self.times, each)]
        if not found:
            return Choice(batch_ms=lengths[0], in_time=False)
        best = Choice(batch_ms=found[0])
        for batch_ms in found if new else ():
            admitted = self._admitted(load, new, memory, batch_ms)
            if len(admitted) > len(best.admitted):
                best = Choice(admitted, batch_ms)
            if len(admitted) == len(new):
                break
        return best

    def is_in_time(self, load: Load) -> bool:
        lengths = self._batch_lengths(load, ())
        return any(leaves_nobody_late(load, self.times, each) for each in lengths)

    def batch(self, load: Load, batch_ms: float) -> Batch:
        ms = first_batch_ms(load, batch_ms)
        tokens = self.times.tokens_within(ms)
        urgent = load.due_ms < ms + batch_ms - EPS_MS
        if urgent.sum() > tokens:  # some are late whatever is done
            urgent[np.argsort(load.due_ms, kind="stable")[tokens:]] = False
        return Batch(
            ms=ms, next_ms=batch_ms, tokens=tokens, steps=0, lengths=urgent.astype(np.int64)
        )

    def _batch_lengths(self, load: Load, new: Sequence[Prompt]) -> list[float]:
        """Falling: as long as those that decode allow, then those of other TPOTs."""
        longest = load.tightest_ms if len(load.ids) else self.idle_ms
        paces = {each.tpot_ms for each in (*load.prompts, *new)} | set(load.tpot_ms.tolist())
        tiers = tiers_of(sorted(paces))
        return [longest, *sorted((each for each in tiers if each < longest), reverse=True)]

    def _admitted(
        self, load: Load, new: Sequence[Prompt], memory: Memory, batch_ms: float
    ) -> tuple[Prompt, ...]:
        able = [
            prompt
            for prompt in by_deadline(new)[:MOST_NEW]
            if leaves_nobody_late(load.joined([prompt]), self.times, batch_ms)
        ]
        if not able:
            return ()
        tiers = tiers_for(load, able)
        admitted = best_set(load, able, memory, tiers, self._budget(tiers, batch_ms))
        while admitted and not leaves_nobody_late(load.joined(admitted), self.times, batch_ms):
            admitted.remove(max(admitted, key=lambda each: each.tokens))
        return tuple(admitted)

    def _budget(self, tiers_ms: tuple[float, ...], batch_ms: float) -> AutoregressiveBudget:
        return AutoregressiveBudget(self.times, tiers_ms, self.idle_ms, batch_ms)


@dataclass(frozen=True)
class Speculative(_Strict):
    """Batches that read most prompt tokens per time. Attributes: see `SpeculativeBudget`."""

    alpha: float
    idle_ms: float
    margin: float = 0.0

    @property
    def reach(self) -> tuple[float, ...]:
        return chain_reach(self.alpha)

    @property
    def fastest_ms(self) -> float:
        return _fastest_ms(self)

    @property
    def promised_ms(self) -> float:
        return self.fastest_ms / (1.0 - self.margin)

    def choose(self, load: Load, new: Sequence[Prompt], memory: Memory) -> Choice:
        if not self.is_in_time(load):
            return Choice(in_time=False)
        able = by_deadline(new)[:MOST_NEW]
        if not able:
            return Choice()
        tiers = tiers_for(load, able)
        found = best_set(load, able, memory, tiers, self._budget(tiers))
        # Those who were left out had a part in the tiers, and batches come in whole numbers: judged
        # by their own tiers, a few sets are just too large.
        while found and not self.is_in_time(load.joined(found)):
            found.remove(max(found, key=lambda each: each.tokens))
        return Choice(tuple(found))

    def is_in_time(self, load: Load) -> bool:
        return reads_in_time(load, self._budget)

    def batch(self, load: Load, batch_ms: float) -> Batch:
        tiers = tiers_for(load, ())
        first_ms = min((each.deadline_ms for each in load.prompts), default=math.inf)
        best = self._budget(tiers).best(np.array(counts_of(load, tiers)), first_ms)
        lengths = np.array(best.lengths)[tier_of(tiers, load.tpot_ms)]
        room = best.tokens - np.cumsum(lengths)
        return Batch(
            ms=best.ms,
            next_ms=best.ms,
            tokens=best.tokens,
            steps=best.steps,
            lengths=np.where(room >= 0, lengths, 0),
        )

    def _budget(self, tiers_ms: tuple[float, ...]) -> SpeculativeBudget:
        return _speculative(self, tiers_ms)


@lru_cache(maxsize=16)
def _fastest_ms(pacing: Speculative) -> float:
    found = enumerate(pacing.reach)
    return min(pacing.times.ms(drafted + 1, drafted) / tokens for drafted, tokens in found)


@lru_cache(maxsize=256)
def _speculative(pacing: Speculative, tiers_ms: tuple[float, ...]) -> SpeculativeBudget:
    return SpeculativeBudget(
        times=pacing.times,
        tiers_ms=tiers_ms,
        alpha=pacing.alpha,
        idle_ms=pacing.idle_ms,
        margin=pacing.margin,
    )
