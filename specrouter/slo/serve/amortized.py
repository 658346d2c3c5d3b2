"""Amortized: pacing where a prompt's time may be made good by all tokens that are still to come.

SLOs-Serve's batches are each in time, as they must be where every run of ten tokens is judged. A
TPOT that is the mean of the whole output is more lenient: a request that stands still for 100 ms
while a prompt is read needs 1 ms less for each of the 100 tokens that it has left. So

- prompts that can wait, those without an objective of the TTFT among them, are read as the strict
  pacing says, in what its batches leave;
- a prompt that cannot is read at once, if that is *sustained*: all such prompts, by rising
  deadline, are in time if nothing else is read, and there is a length of cycles in which the tokens
  that each request verifies bring as many as it needs, the prompts' time taken off;
- who decodes and needs most is given up where that admits more urgent prompts than it loses.

Which of the urgent prompts are read is found as by Moore and Hodgson, who leave the fewest late on
one machine: by rising deadline, and where one is too many, the longest is left out.

How requests decode is the planner's to choose: it sees objectives and trees. Pure.
Source: SLOs-Serve (arXiv 2504.08784), section 3.2; this relaxation is ours, see docs/decisions.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from specrouter.profile.batch_time import BatchTime
from specrouter.slo.serve.load import Load, Prompt
from specrouter.slo.serve.pacing import Batch, Choice, Pacing
from specrouter.slo.serve.program import MOST_NEW, Memory

Floats = NDArray[np.float64]

_URGENT = 10.0  # times its own reading: a prompt whose deadline is nearer cannot wait
_MOST_NEW = 32  # urgent prompts that one decision chooses among
_GIVEN_UP = (1, 2, 4, 8, 16, 32)  # requests, as many as are tried
_CYCLES = 24  # lengths of cycles that are tried
_MARGIN = 0.2  # of every TPOT, for prompts that are still to come


@dataclass(frozen=True)
class Amortized:
    """Attributes:
    strict: for prompts that can wait.
    chunk: prompt tokens that a cycle reads at most.
    """

    strict: Pacing
    chunk: int
    leaves_decoding: ClassVar[bool] = True

    @property
    def times(self) -> BatchTime:
        return self.strict.times

    @property
    def reach(self) -> tuple[float, ...]:
        return self.strict.reach

    @property
    def fastest_ms(self) -> float:
        return self.strict.fastest_ms

    @cached_property
    def _token_ms(self) -> float:
        """What a prompt's token adds to a cycle."""
        return (self.times.ms(self.chunk + 1) - self.times.ms(1)) / self.chunk

    def beside(self, tokens: int) -> "Amortized":
        chunk = max(1, self.chunk - tokens)
        return replace(self, strict=self.strict.beside(tokens), chunk=chunk)

    def is_in_time(self, load: Load) -> bool:
        return self.strict.is_in_time(load) or self._is_sustained(load)

    def choose(self, load: Load, new: Sequence[Prompt], memory: Memory) -> Choice:
        new = new if memory.rows > 0 else ()
        urgent = {each.id for each in new if self._is_urgent(each)}
        most = min(len(urgent), max(0, memory.rows), MOST_NEW + _MOST_NEW)
        best = self._choice(load, new, memory)
        gained = sum(each.id in urgent for each in best.admitted)
        if urgent and not best.in_time:
            gained = -len(load.ids) - 1  # somebody is late in any case
        for count in _GIVEN_UP:
            if count > len(load.ids) or gained >= most - count:
                break
            found = self._choice(load.without_neediest(count), new, memory)
            kept = sum(each.id in urgent for each in found.admitted) - count
            if found.in_time and kept > gained:
                best, gained = replace(found, given_up=count), kept
        return best

    def _choice(self, load: Load, new: Sequence[Prompt], memory: Memory) -> Choice:
        calm = self.strict.choose(load, new, memory)
        names = {each.id for each in calm.admitted}
        urgent = [each for each in new if each.id not in names and self._is_urgent(each)]
        if calm.in_time and not urgent:
            return calm
        beside = load.joined(calm.admitted)
        if not self._is_sustained(beside):
            return calm
        tokens = memory.tokens
        if tokens is not None:
            tokens -= sum(each.reserve_tokens for each in calm.admitted)
        rest = Memory(memory.rows - len(calm.admitted), tokens)
        found: list[Prompt] = []
        for prompt in sorted(urgent, key=lambda each: each.deadline_ms)[:_MOST_NEW]:
            found.append(prompt)
            if not (rest.holds(found) and self._is_sustained(beside.joined(found))):
                found.remove(max(found, key=lambda each: each.tokens))
        return Choice((*calm.admitted, *found))

    def batch(self, load: Load, batch_ms: float) -> Batch:
        batch = self.strict.batch(load, batch_ms)
        urgent = sum(each.tokens for each in load.prompts if self._is_urgent(each))
        tokens = int(batch.lengths.sum()) + min(urgent, self.chunk)
        return replace(batch, tokens=max(batch.tokens, tokens))

    def _is_urgent(self, prompt: Prompt) -> bool:
        reading_ms = self.times.ms(min(prompt.tokens, self.chunk))
        return not prompt.can_wait and prompt.deadline_ms < _URGENT * reading_ms

    def _is_sustained(self, load: Load) -> bool:
        return self._reads_in_time(load.prompts) and self._keeps_up(load)

    def _reads_in_time(self, prompts: Sequence[Prompt]) -> bool:
        """In chunks, by rising deadline, if nothing else is read."""
        read = np.cumsum([each.tokens for each in prompts])
        whole, rest = np.divmod(read, self.chunk)
        ended_ms = whole * self.times.ms(self.chunk) + [
            self.times.ms(tokens) if tokens else 0.0 for tokens in rest.tolist()
        ]
        return bool((ended_ms <= [each.deadline_ms for each in prompts]).all())

    def _keeps_up(self, load: Load) -> bool:
        """Is there a length of cycles in which everybody's verified tokens bring enough?"""
        unread = sum(each.tokens for each in load.prompts)
        paces = load.tpot_ms - self._token_ms * unread / load.left
        coming = [each.tpot_ms for each in load.prompts if np.isfinite(each.tpot_ms)]
        paces = np.concatenate((paces, coming)) * (1.0 - _MARGIN)
        if not len(paces):
            return True
        if paces.min() < self.fastest_ms:
            return False
        shortest, longest = self.times.ms(len(paces)), float(paces.min()) * self.reach[-1]
        if longest < shortest:
            return False
        cycles_ms = np.geomspace(shortest, longest, _CYCLES)
        counts = np.arange(1.0, len(self.reach) + 1.0)
        needs = np.interp(cycles_ms[:, None] / paces, self.reach, counts)  # [_CYCLES, R]
        steps = np.ceil(needs.max(axis=1)).astype(int) - 1
        return any(
            self.times.ms(tokens, step) <= ms
            for tokens, step, ms in zip(
                needs.sum(axis=1).tolist(), steps.tolist(), cycles_ms.tolist(), strict=True
            )
        )
