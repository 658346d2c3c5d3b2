"""Amortized: pacing in which all tokens that are left may make up for the time of a prompt.

A TPOT is the mean over an output: a request that pauses for 100 ms while a prompt is read needs 1
ms less for each of the 100 tokens that it has left. A load is *sustained* (docs/routing.md) if
there are cycles that keep all paces which this leaves, and that read all prompts by their
deadlines. The neediest are given up until the load is sustained. New requests are admitted by
deadline, as long as it stays so; while any are given up, only those that cannot wait, and those
without a TTFT only if no request could keep the paces that are given up.

An urgent prompt is read in such cycles, as much of it as they allow. Otherwise prompts are read in
the cycles that read most of them per millisecond without delaying anybody. No cycle takes longer
than the unread prompts allow, and requests that decode without an objective sit out if there is no
room. The planner chooses how requests decode.
Pure. It relaxes SLOs-Serve (arXiv 2504.08784), section 3.2, whose batches are each in time.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from specrouter.profile.batch_time import Reserved
from specrouter.slo.serve.load import Load, Prompt
from specrouter.slo.serve.pacing import Batch, Choice, Memory, Pacing
from specrouter.slo.serve.reservation import first_chunk, longest_ms

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_URGENT = 10.0  # a prompt with less time left than this multiple of its reading is urgent
_MOST_NEW = 16  # new prompts that one decision considers
_CYCLES = 24  # number of cycle lengths that are tried
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Amortized(Pacing):
    """The pacing that makes up for prompts over all tokens that are left.

    Attributes:
        chunk: prompt tokens that a cycle reads at most.
    """

    chunk: int
    margin: float = 0.2

    @cached_property
    def _token_ms(self) -> float:
        """The time that one prompt token adds to a cycle."""
        return (self.times.ms(self.chunk + 1) - self.times.ms(1)) / self.chunk

    def beside(self, tokens: int) -> Self:
        return replace(super().beside(tokens), chunk=max(1, self.chunk - tokens))

    def is_in_time(self, load: Load) -> bool:
        """Return whether the load is sustained."""
        return self._reading_beside(load) is not None

    def in_time(self, load: Load, in_order: Sequence[Prompt], kept_back: float) -> frozenset[int]:
        """Return the ids of those of the load that attain their objectives if all requests decode.

        Prompts are read `in_order`. The share `kept_back` of every objective is for later requests.
        If not all paces can be kept, the neediest are given up.
        """
        kept = 1.0 - kept_back
        paces = self._paces(load) * kept
        by_need = np.argsort(paces, kind="stable")
        paces = paces[by_need]
        ids = np.array([*load.ids, *(each.id for each in self._coming(load))])[by_need]

        def without(given_up: int) -> Reserved | None:
            return self._beside(paces[given_up:], load.others + given_up)

        given_up, times = 0, without(0)  # the usual case
        if times is None:
            given_up = bisect_left(range(len(paces)), True, key=lambda n: without(n) is not None)
            times = without(given_up)
            assert times is not None, "no request is left whose pace could be missed"
        lost = set(ids[:given_up].tolist())
        cycle_ms, read = times.ms(self.chunk), 0
        for prompt in in_order:
            read += prompt.tokens
            took_ms = read / self.chunk * cycle_ms
            is_late = not prompt.is_soft and took_ms > prompt.deadline_ms * kept
            if is_late or prompt.tpot_ms < self.promised_ms:
                lost.add(prompt.id)
        known = {*load.ids, *(each.id for each in in_order)}
        return frozenset(known - lost)

    def choose(self, load: Load, new: Sequence[Prompt], memory: Memory) -> Choice:
        given_up = self._given_up(load)
        if given_up is None:
            return Choice(in_time=False)
        able = sorted(new, key=lambda each: (each.is_soft, each.deadline_ms))
        lighter = load.without_neediest(given_up)
        if given_up:  # new requests come at the cost of those, so only if they cannot wait
            is_hopeless = given_up <= (load.tpot_ms < self.promised_ms).sum()
            able = [
                one for one in able if self._is_urgent(one) and (is_hopeless or not one.is_soft)
            ]
        found: list[Prompt] = []
        for prompt in able[:_MOST_NEW] if memory.rows > 0 else ():
            wanted = [*found, prompt]
            if memory.holds(wanted) and self.is_in_time(lighter.joined(wanted)):
                found = wanted
        return Choice(tuple(found), given_up=given_up)

    def _given_up(self, load: Load) -> int | None:
        """Return how many of the neediest are given up, so that the others stay in time.

        None: prompts would be late even then. The number is doubled each time: if just enough were
        given up, the next cycle would give up more.
        """
        count = 0
        while not self.is_in_time(load.without_neediest(count)):
            count = 2 * count or 1
            if count > len(load.ids):
                return None
        return count

    def batch(self, load: Load, choice: Choice) -> Batch:
        batch, prompts = self._calm(load), load.prompts
        if all(each.can_wait for each in prompts):
            return self._with_room(load, batch.reading(prompts))
        times = self._reading_beside(load)
        if times is not None and any(map(self._is_urgent, prompts)):
            first = first_chunk(times, self.chunk, prompts) or 0
            batch = replace(batch, tokens=int(batch.lengths.sum()) + first)
        batch = batch.reading(prompts)
        most_ms, spare = batch.ms, batch.room
        if times is not None:
            most_ms = longest_ms(times, self.chunk, prompts, batch.chunks)
            spare = max(0, times.tokens_within(most_ms) - sum(batch.chunks))
        room = min(batch.room, max(0, spare - load.others))
        return replace(batch, longest_ms=most_ms, room=room, spare=spare)

    def _calm(self, load: Load) -> Batch:
        """Return the batch that reads most prompt tokens per millisecond at all paces.

        If not even all tokens of decoding requests fit in it, the last ones sit out.
        """
        paces = load.tpot_ms * (1.0 - self.margin)
        if not len(paces):
            tokens = self.times.tokens_within(self.idle_ms)
            return Batch(ms=self.idle_ms, tokens=tokens, lengths=np.zeros(0, dtype=np.int64))
        best = None
        for ms, needs in zip(*self._cycles(paces, self.times.ms(len(paces))), strict=True):
            steps = math.ceil(needs.max() - _ROUNDING) - 1
            tokens = self.times.tokens_within(ms, steps)
            spare = (tokens - float(needs.sum())) / ms
            if best is None or spare > best[0]:
                best = spare, ms, tokens, needs
        assert best is not None, "there is at least one cycle time"
        _, ms, tokens, needs = best
        lengths = np.ceil(needs - _ROUNDING).astype(np.int64)
        lengths = np.where(np.cumsum(lengths) <= tokens, lengths, 0)
        return Batch(ms=ms, tokens=tokens, lengths=lengths)

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

    def _reading_beside(self, load: Load) -> Reserved | None:
        """Return the times of cycles that read the admitted prompts in time; None: none do."""
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
        coming = [each.tpot_ms for each in self._coming(load)]
        found: Floats = np.concatenate((paces, coming)) * (1.0 - self.margin)
        return found

    def _coming(self, load: Load) -> list[Prompt]:
        """Return the prompts whose requests will decode at a pace that can be kept."""
        return [each for each in load.prompts if self.promised_ms <= each.tpot_ms < math.inf]

    def _beside(self, paces: Floats, others: int) -> Reserved | None:
        if not len(paces):
            return Reserved(self.times, others)
        shortest = self.times.ms(len(paces) + others)
        if paces.min() < self.fastest_ms or float(paces.min()) * self.reach[-1] < shortest:
            return None
        cycles_ms, needs = self._cycles(paces, shortest)
        steps = np.ceil(needs.max(axis=1)).astype(int) - 1
        verified = (needs.sum(axis=1) + others).tolist()
        for tokens, step, ms in zip(verified, steps.tolist(), cycles_ms, strict=True):
            if self.times.ms(tokens, step) <= ms:
                return Reserved(self.times, math.ceil(tokens), step)
        return None

    def _cycles(self, paces: Floats, shortest_ms: float) -> tuple[list[float], Floats]:
        """Return cycle times [C], and the tokens [C, R] to verify in each to keep the paces."""
        longest_ms = max(float(paces.min() * self.reach[-1]), shortest_ms)
        cycles_ms = np.geomspace(shortest_ms, longest_ms, _CYCLES)
        counts = np.arange(1.0, len(self.reach) + 1.0)
        return cycles_ms.tolist(), np.interp(cycles_ms[:, None] / paces, self.reach, counts)
