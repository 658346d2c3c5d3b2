"""Batches that decode one token at a time, as SLOs-Serve forms them where nothing drafts.

`leaves_nobody_late` answers for them, in closed form, what an execution would show batch by batch:
each decoding request takes part in the last batch that still brings its next token in time, and
prompts are read by earliest deadline. It knows when each next token is due, where the dynamic
program counts requests only: what the program admits, it finds feasible, and what is feasible stays
so from batch to batch.

The policy `slo` does without: there all decode in every cycle, as the planner has it.
Pure. Source: SLOs-Serve (arXiv 2504.08784), Algorithm 2. Where it contradicts itself:
research/FIGURES.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from research.policies.admission_dp import MOST_NEW, best_set, tiers_for, tiers_of
from research.policies.prefill_budget import PrefillBudget, whole_batches
from research.policies.strict_pacing import StrictPacing
from specrouter.profile.batch_time import BatchTime
from specrouter.slo.serve.load import EPS_MS, Load, Prompt, by_deadline
from specrouter.slo.serve.pacing import Batch, Choice, Memory

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class AutoregressiveBudget(PrefillBudget):
    """Attributes:
    tiers_ms: [L] TPOT of each, rising.
    idle_ms: what a batch may take while nobody decodes who has an objective.
    most_ms: what a batch may take at most.
    """

    times: BatchTime
    tiers_ms: tuple[float, ...]
    idle_ms: float
    most_ms: float = np.inf

    @cached_property
    def _sizes(self) -> tuple[Floats, Floats]:
        """[L + 1] what a batch takes, and reads, if a tier is the tightest; last: if none is."""
        paces = np.where(np.isinf(self.tiers_ms), self.idle_ms, self.tiers_ms)
        batch_ms = np.minimum([*paces, self.idle_ms], self.most_ms)
        tokens = [float(self.times.tokens_within(float(each))) for each in batch_ms]
        return batch_ms, np.array(tokens)

    @cached_property
    def _is_paced(self) -> Bools:
        return np.isfinite(self.tiers_ms)

    def _tightest(self, counts: Ints) -> Ints:
        present = (counts > 0) & self._is_paced
        place = np.argmax(present, axis=-1)
        tightest: Ints = np.where(present.any(axis=-1), place, len(self.tiers_ms))
        return tightest

    def over(self, spans_ms: Floats, counts: Ints) -> Floats:
        tightest = self._tightest(counts)
        batch_ms, tokens = (each[tightest] for each in self._sizes)
        batches = whole_batches(spans_ms, batch_ms)
        paces = np.array(self.tiers_ms)
        each = np.ceil((batches * batch_ms)[..., None] / paces - _ROUNDING)
        left = batches * tokens - (counts * each).sum(axis=-1)
        return np.where(self.holds(counts), left, -np.inf)

    def holds(self, counts: Ints) -> Bools:
        tokens = self._sizes[1][self._tightest(counts)]
        return np.asarray((counts * self._is_paced).sum(axis=-1) <= tokens)


@dataclass(frozen=True, kw_only=True)
class TimedChoice(Choice):
    """`batch_ms`: time of batches."""

    batch_ms: float


class Autoregressive(StrictPacing):
    """Batches of the tightest TPOT that decodes, or shorter where only that serves all in time.
    Without drafts: `alpha` is 0."""

    def choose(self, load: Load, new: Sequence[Prompt], memory: Memory) -> TimedChoice:
        lengths = self._batch_lengths(load, new)
        found = [each for each in lengths if leaves_nobody_late(load, self.times, each)]
        if not found:
            return TimedChoice(batch_ms=lengths[0], in_time=False)
        best = TimedChoice(batch_ms=found[0])
        for batch_ms in found if new else ():
            admitted = self._admitted(load, new, memory, batch_ms)
            if len(admitted) > len(best.admitted):
                best = TimedChoice(admitted, batch_ms=batch_ms)
            if len(admitted) == len(new):
                break
        return best

    def is_in_time(self, load: Load) -> bool:
        lengths = self._batch_lengths(load, ())
        return any(leaves_nobody_late(load, self.times, each) for each in lengths)

    def batch(self, load: Load, choice: Choice) -> Batch:
        assert isinstance(choice, TimedChoice)
        batch_ms = choice.batch_ms
        ms = first_batch_ms(load, batch_ms)
        tokens = self.times.tokens_within(ms)
        urgent = load.due_ms < ms + batch_ms - EPS_MS
        if urgent.sum() > tokens:  # some are late whatever is done
            urgent[np.argsort(load.due_ms, kind="stable")[tokens:]] = False
        batch = Batch(ms=ms, tokens=tokens, lengths=urgent.astype(np.int64))
        return self.with_prompts(load, batch, batch_ms)

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
        budget = AutoregressiveBudget(self.times, tiers, self.idle_ms, batch_ms)
        admitted = best_set(load, able, memory, tiers, budget)
        while admitted and not leaves_nobody_late(load.joined(admitted), self.times, batch_ms):
            admitted.remove(max(admitted, key=lambda each: each.tokens))
        return tuple(admitted)


def first_batch_ms(load: Load, batch_ms: float) -> float:
    """What the next batch may take where others take `batch_ms`: no token that is due is late."""
    least_ms = float(load.due_ms.min(initial=np.inf))
    return batch_ms if least_ms >= batch_ms - EPS_MS else least_ms


def leaves_nobody_late(load: Load, times: BatchTime, batch_ms: float) -> bool:
    """Are all prompts read by their deadlines, and all tokens in time, in batches of `batch_ms`?

    Batches become shorter when a request that decodes faster has read its prompt.
    """
    ended_ms = first_batch_ms(load, batch_ms)
    supply, size = times.tokens_within(ended_ms), times.tokens_within(batch_ms)
    paces = load.tpot_ms
    # Who is far ahead may lose that, with the end of a stage: no more than one token is counted on.
    ratio = paces / batch_ms
    is_whole = np.abs(ratio - np.rint(ratio)) < _ROUNDING
    due = np.minimum(load.due_ms, paces + np.where(is_whole, 0.0, batch_ms))
    claimed, read = np.zeros(len(due)), 0
    if _claims(due, paces, ended_ms + batch_ms).sum() > supply:
        return False
    for prompt in load.prompts:
        batches = math.floor((prompt.deadline_ms - ended_ms) / batch_ms + _ROUNDING)
        if batches < 0:
            return False
        ended_ms, supply = ended_ms + batches * batch_ms, supply + batches * size
        claimed = np.maximum(claimed, _claims(due, paces, ended_ms + batch_ms))
        read += prompt.tokens
        if supply - claimed.sum() < read:
            return False
        if math.isfinite(prompt.tpot_ms):
            due = np.append(due, ended_ms + prompt.tpot_ms)
            paces = np.append(paces, prompt.tpot_ms)
            claimed = np.append(claimed, 0.0)
            if prompt.tpot_ms < batch_ms:
                batch_ms = prompt.tpot_ms
                size = times.tokens_within(batch_ms)
    return len(paces) <= size


def _claims(due_ms: Floats, paces_ms: Floats, until_ms: float) -> Floats:
    """Tokens of each request that are due before a time."""
    found: Floats = np.maximum(np.ceil((until_ms - due_ms) / paces_ms - _ROUNDING), 0.0)
    return found
