"""Amortized: pacing in which all tokens that are left may make up for the time of a prompt.

SLOs-Serve's batches are each in time, as they must be where every run of ten tokens is judged. A
TPOT that is the mean of the whole output is more lenient: a request that pauses for 100 ms while a
prompt is read needs 1 ms less for each of the 100 tokens that it has left. Such cycles are
*sustained* (docs/routing.md). Prompts that can wait are read in the room that strict batches leave.
No cycle takes longer than the unread prompts allow, and requests that decode without an objective
sit out if there is no room. The planner chooses how requests decode, unless only the strict batches
keep all in time: then those are followed exactly. Pure.
Source: SLOs-Serve (arXiv 2504.08784), section 3.2; this relaxation is ours, see
docs/architecture.md.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from specrouter.profile.batch_time import Reserved
from specrouter.slo.serve.admission_dp import Memory
from specrouter.slo.serve.load import Load, Prompt
from specrouter.slo.serve.pacing import Batch, Choice, Pacing
from specrouter.slo.serve.reservation import first_chunk, longest_ms

Floats = NDArray[np.float64]

_URGENT = 10.0  # a prompt with less time left than this multiple of its reading is urgent
_MOST_NEW = 16  # urgent prompts that one decision considers
_CYCLES = 24  # number of cycle lengths that are tried
_COMING = 0.35  # share of every objective kept for later requests in a first-come order
_MARGIN = 0.2  # share of every TPOT kept for prompts that are still to come


@dataclass(frozen=True, kw_only=True)
class Amortized(Pacing):
    """The pacing that makes up for prompts over all tokens that are left.

    Attributes:
        chunk: prompt tokens that a cycle reads at most.
    """

    chunk: int
    leaves_decoding: ClassVar[bool] = True

    @cached_property
    def _token_ms(self) -> float:
        """The time that one prompt token adds to a cycle."""
        return (self.times.ms(self.chunk + 1) - self.times.ms(1)) / self.chunk

    def beside(self, tokens: int) -> Self:
        return replace(super().beside(tokens), chunk=max(1, self.chunk - tokens))

    def is_in_time(self, load: Load) -> bool:
        return self.keeps_all(load) or self._is_sustained(load)

    def in_time(self, load: Load, in_order: Sequence[Prompt] | None = None) -> frozenset[int]:
        """Return the ids of those of the load that attain their objectives if all requests decode.

        If not all can, the neediest are given up. Prompts are read by deadline, or `in_order`.
        """
        prompts = load.prompts if in_order is None else in_order
        kept = 1.0 if in_order is None else 1.0 - _COMING
        paces = self._paces(load) * kept
        by_need = np.argsort(paces, kind="stable")
        paces = paces[by_need]
        ids = np.array([*load.ids, *(each.id for each in _paced(load))])[by_need]

        def without(given_up: int) -> Reserved | None:
            return self._beside(paces[given_up:], load.others + given_up)

        given_up, times = 0, without(0)  # the usual case
        if times is None:
            given_up = bisect_left(range(len(paces)), True, key=lambda n: without(n) is not None)
            times = without(given_up)
            assert times is not None, "nobody is left whose pace could be missed"
        lost = set(ids[:given_up].tolist())
        cycle_ms, read = times.ms(self.chunk), 0
        for prompt in prompts:
            read += prompt.tokens
            took_ms = read / self.chunk * cycle_ms
            if not prompt.is_soft and took_ms > prompt.deadline_ms * kept:
                lost.add(prompt.id)
        known = {*load.ids, *(each.id for each in prompts)}
        return frozenset(known - lost)

    def choose(self, load: Load, new: Sequence[Prompt], memory: Memory) -> Choice:
        new = new if memory.rows > 0 else ()
        calm = super().choose(load, new, memory)
        if calm.in_time or self._is_sustained(load):
            admitted = self._with_urgent(load, calm.admitted, new, memory)
            return replace(calm, admitted=admitted, in_time=True)
        # Doubled each time: if just enough were given up, the next cycle would give up more.
        count, most = 1, len(load.ids) if any(map(self._is_urgent, new)) else 0
        while count <= most:
            lighter = load.without_neediest(count)
            if self._is_sustained(lighter):
                admitted = self._with_urgent(lighter, (), new, memory)
                calm = super().choose(lighter, (), memory)
                return replace(calm, admitted=admitted, in_time=True, given_up=count)
            count *= 2
        return calm

    def _with_urgent(
        self, load: Load, calm: Sequence[Prompt], new: Sequence[Prompt], memory: Memory
    ) -> tuple[Prompt, ...]:
        names = {each.id for each in calm}
        urgent = [each for each in new if each.id not in names and self._is_urgent(each)]
        beside = load.joined(calm)
        if not urgent or not self._is_sustained(beside):
            return tuple(calm)
        found: list[Prompt] = []
        for prompt in sorted(urgent, key=lambda each: (each.is_soft, each.deadline_ms))[:_MOST_NEW]:
            wanted = [*found, prompt]
            if memory.holds([*calm, *wanted]) and self._is_sustained(beside.joined(wanted)):
                found = wanted
        return (*calm, *found)

    def batch(self, load: Load, batch_ms: float) -> Batch:
        batch = super().batch(load, batch_ms)
        urgent = [place for place, each in enumerate(load.prompts) if self._is_urgent(each)]
        times = self._reading_beside(load) if urgent else None
        first = None if times is None else first_chunk(times, self.chunk, load.prompts)
        if first is None:
            return batch
        return replace(batch, tokens=int(batch.lengths.sum()) + first)

    def reserved(self, load: Load, batch: Batch) -> Batch:
        if all(each.can_wait for each in load.prompts):
            return self._with_room(load, batch)
        times = self._reading_beside(load)
        most_ms, spare = batch.ms, batch.room
        if times is not None:
            most_ms = longest_ms(times, self.chunk, load.prompts, batch.chunks)
            spare = max(0, times.tokens_within(most_ms) - sum(batch.chunks))
        elif self.keeps_all(load):
            return replace(batch, paces_decoding=True)
        room = min(batch.room, max(0, spare - load.others))
        return replace(batch, longest_ms=most_ms, room=room, spare=spare)

    def _with_room(self, load: Load, batch: Batch) -> Batch:
        """Return the batch with the room that is left for requests without an objective."""
        most = load.others + batch.room
        if not len(load.ids) or self._keeping_up(load, most) is not None:
            return batch
        spare = bisect_left(range(most), True, key=lambda n: self._keeping_up(load, n + 1) is None)
        room = max(0, spare - load.others) + int((batch.lengths == 0).sum())
        return replace(batch, spare=spare, room=min(batch.room, room))

    def _is_urgent(self, prompt: Prompt) -> bool:
        reading_ms = self.times.ms(min(prompt.tokens, self.chunk))
        return not prompt.can_wait and prompt.deadline_ms < _URGENT * reading_ms

    def _is_sustained(self, load: Load) -> bool:
        return self._reading_beside(load) is not None

    def _reading_beside(self, load: Load) -> Reserved | None:
        """Return the times of cycles that read the admitted prompts in time.

        None: the strict pacing's batches are followed, whether they keep all in time or nothing
        does.
        """
        times = self._keeping_up(load)
        holds = times is not None and first_chunk(times, self.chunk, load.prompts) is not None
        return times if holds else None

    def _keeping_up(self, load: Load, others: int = 0) -> Reserved | None:
        """Return the times of cycles beside the shortest verification that keeps all paces.

        None: there is none. `others`: tokens of requests without an objective, which may sit out.
        """
        return self._beside(self._paces(load), others)

    def _paces(self, load: Load) -> Floats:
        """Return the time per token that each request can afford while prompts are read as well."""
        unread = sum(each.tokens for each in load.prompts)
        paces = load.tpot_ms - self._token_ms * unread / load.left
        coming = [each.tpot_ms for each in _paced(load)]
        found: Floats = np.concatenate((paces, coming)) * (1.0 - max(_MARGIN, self.margin))
        return found

    def _beside(self, paces: Floats, others: int) -> Reserved | None:
        if not len(paces):
            return Reserved(self.times, others)
        if paces.min() < self.fastest_ms:
            return None
        shortest = self.times.ms(len(paces) + others)
        longest = float(paces.min()) * self.reach[-1]
        if longest < shortest:
            return None
        cycles_ms = np.geomspace(shortest, longest, _CYCLES)
        counts = np.arange(1.0, len(self.reach) + 1.0)
        needs = np.interp(cycles_ms[:, None] / paces, self.reach, counts)  # [_CYCLES, R]
        steps = np.ceil(needs.max(axis=1)).astype(int) - 1
        verified = (needs.sum(axis=1) + others).tolist()
        for tokens, step, ms in zip(verified, steps.tolist(), cycles_ms.tolist(), strict=True):
            if self.times.ms(tokens, step) <= ms:
                return Reserved(self.times, math.ceil(tokens), step)
        return None


def _paced(load: Load) -> list[Prompt]:
    return [each for each in load.prompts if math.isfinite(each.tpot_ms)]
