"""SimulatedPair: a stream pair, whose one half reads prompts and whose other half decodes.

Contract: the prefill half chooses the first token; keys and values of the target travel to the
decode half, which goes on from them once they are there. Drafters read their prompts on the decode
side. Both halves are one replica to a router, and live and die together.
Source: StreamServe (arXiv 2604.09562), sections 3 and 4.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from research.sim.cluster.replica import Served, SimulatedReplica
from research.sim.request import Commits
from specrouter.bench.replay import LoadRequest
from specrouter.cluster.state import ReplicaState


@dataclass(eq=False)
class _Reading:
    """A request at the prefill half."""

    request: LoadRequest
    sent_s: float
    served: Served


@dataclass(eq=False, kw_only=True)
class SimulatedPair:
    """`kv_ms_per_token`: of prompt, that keys and values travel."""

    prefill: SimulatedReplica
    decode: SimulatedReplica
    kv_ms_per_token: float
    _reading: list[_Reading] = field(default_factory=list)
    _travelling: list[tuple[float, int, _Reading]] = field(default_factory=list)  # due, in order
    _numbers: "count[int]" = field(default_factory=count)

    def state(self) -> ReplicaState:
        """Memory and rows of the half that decodes, prompts of the one that reads; whoever has not
        come to the decode half waits."""
        reads, decodes = self.prefill.state(), self.decode.state()
        waiting = reads.requests + len(self._travelling) + decodes.waiting
        return replace(
            decodes,
            waiting=waiting,
            unread_tokens=reads.unread_tokens,
            prefill_ms=reads.prefill_ms,
            retry_after_s=max(reads.retry_after_s, decodes.retry_after_s),
        )

    @property
    def rows_given_s(self) -> Sequence[float]:
        return self.decode.rows_given_s

    @property
    def next_s(self) -> float | None:
        due_s = [self.prefill.next_s, self.decode.next_s]
        due_s += [at_s for at_s, _, _ in self._travelling[:1]]
        return min((each for each in due_s if each is not None), default=None)

    def run_until(self, now_s: float) -> None:
        self.prefill.run_until(now_s)
        self.decode.run_until(now_s)

    def go_on(self, now_s: float) -> None:
        while self._travelling and self._travelling[0][0] <= now_s:
            self._arrive(heapq.heappop(self._travelling)[2])
        for half in (self.prefill, self.decode):
            half_s = half.next_s
            if half_s is not None and half_s <= now_s:
                half.go_on(now_s)
        self._send_on()

    def receive(self, request: LoadRequest, sent_s: float, commits: list[Commits]) -> Served:
        made = sum(tokens for _, tokens in commits) + 1
        asked = request
        if made < request.new_tokens:
            asked = replace(
                request, new_tokens=made, objective_ms=None, stages=(), judges_runs=False
            )
        served = self.prefill.receive(asked, sent_s, commits)
        served.is_last = asked is request or served.sent.refusal is not None
        if not served.is_last:
            self._reading.append(_Reading(request, sent_s, served))
        return served

    def _send_on(self) -> None:
        """Keys and values of those whose first token is there."""
        done = [one for one in self._reading if one.served.sent.is_done]
        for one in done:
            self._reading.remove(one)
            if one.served.sent.is_cancelled or one.served.sent.refusal:
                one.served.is_last = True
                continue
            sent = one.served.sent
            at_s = sent.last_s + self.kv_ms_per_token * sent.prompt_tokens / 1000
            heapq.heappush(self._travelling, (at_s, next(self._numbers), one))

    def _arrive(self, reading: _Reading) -> None:
        read = reading.served.sent
        if read.is_cancelled:
            reading.served.is_last = True
            return
        held = read.prompt_tokens + read.tokens - 1
        found = self.decode.receive(reading.request, reading.sent_s, read.commits, held)
        reading.served.sent, reading.served.is_last = found.sent, True
