"""Admission by objectives: the policy `slo` (docs/routing.md), and the parts of SLOs-Serve's.

`slo` follows first come, first served where that is predicted to attain all objectives, and where
predictions have proved wrong. Otherwise it admits the requests that can be served in time. It
reconsiders a request as long as it could attain its objective. No request starves: the oldest
best-effort request that has waited `patience_ms` gets its row before any other is admitted, then a
token in every batch, or an eighth of one for its prompt. So it ends, at the latest, after
`patience_ms`, the end of those that ran then, its prompt in such chunks, and as many batches as its
output has tokens.

Pure: `(EngineView) -> Admission`. Source: SLOs-Serve (arXiv 2504.08784), sections 3 and 4.1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from specrouter.slo.admission import Admission, Admit, fcfs
from specrouter.slo.serve.amortized import Amortized
from specrouter.slo.serve.load import Load, Prompt
from specrouter.slo.serve.pacing import Batch, Choice, Memory, Pacing
from specrouter.slo.serve.requests import Sorted, has_objective, is_old, sorted_requests
from specrouter.view import EngineView, RequestTable

PacingOf = Callable[[EngineView], Pacing]

# Share of wrong predictions from which on requests are served as they come.
MOST_ERROR = 0.5
_COMING = 0.35  # share of every objective kept for later requests while they are served in order
_SHARE = 8  # a promoted prompt reads one part in 8 of a batch
_LEAST_CHUNK = 16


@dataclass(kw_only=True)
class Decision:
    """The decision of one cycle.

    Attributes:
        asked: the requests, by what they need.
        least_chunk: chunk of a promoted prompt.
    """

    view: EngineView
    pacing: Pacing
    asked: Sorted
    patience_ms: float
    least_chunk: int
    rows: int = 0  # free
    memory: float = math.inf  # free KV tokens
    admitted: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    waits_for_memory: bool = False
    promoted: RequestTable | None = None  # a single request
    fixed: dict[int, int] = field(default_factory=dict)  # tokens of the promoted request, by id

    def admission(self) -> Admission:
        """Admit the requests that can be served in time, then best-effort ones."""
        view, pacing, asked = self.view, self.pacing, self.asked
        self.rows = view.free_rows
        self.memory = math.inf if view.kv_free_tokens is None else float(view.kv_free_tokens)
        self.promoted = self._promoted()
        one, has_row = self.promoted, True
        if one is not None:
            has_row = one.row[0] >= 0 or self._admit(int(one.id[0]), int(one.kv_tokens[0]))
            pacing = self._beside(one) if has_row else pacing
        choice = self._choose(pacing, is_open=has_row)
        if self.fixed and not choice.in_time:  # the promoted request waits for room
            pacing, self.fixed = self.pacing, {}
            choice = self._choose(pacing, is_open=False)
        came = [
            replace(prompt, is_running=True)
            for prompt in choice.admitted
            if self._admit(prompt.id, prompt.kv_tokens)
        ]
        load = asked.load.without_neediest(choice.given_up).joined(came)
        batch = pacing.batch(load, choice)
        self._admit_best_effort()
        kept = self.promoted.id if self.promoted is not None else ()
        beside = np.setdiff1d(asked.beside.id, kept)
        return replace(
            self.written(load, batch),
            ranks=dict.fromkeys(beside.tolist(), 1.0),
            promised=frozenset(prompt.id for prompt in came),
            lost=asked.lost,
        )

    def first_come(self, fcfs: Admit) -> tuple[Admission, int]:
        """Return `fcfs`'s admission, and the number of requests that might miss objectives by it.

        Those are meant that miss them if `_COMING` of each is kept back for later requests.
        Declined requests stay declined. But `fcfs` tries requests that were declined for a TPOT
        that is too tight for any promise.
        """
        view, asked, pacing = self.view, self.asked, self.pacing
        assert isinstance(pacing, Amortized), "others do not predict who attains an objective"
        declined = set(asked.beyond)
        staying = view.waiting.take(~(view.waiting.rejects & view.waiting.among(declined)))
        tried = asked.too_tight.intersection(staying.id.tolist())
        theirs = fcfs(replace(view, waiting=staying))
        admitted = set(theirs.admitted)
        new = [one for one in asked.new if one.id in admitted]
        load = asked.load.joined(new)
        prompts = {one.id: one for one in load.prompts}
        unpaced = asked.beside
        others = unpaced.take((unpaced.row >= 0) | unpaced.among(admitted))
        rest = {
            name: Prompt(id=name, deadline_ms=math.inf, tokens=unread + 1,
                         tpot_ms=math.inf, is_soft=True)
            for name, unread in zip(others.id.tolist(), others.unread.tolist(), strict=True)
            if unread
        }  # fmt: skip
        order = view.running.id.tolist() + list(theirs.admitted)
        in_order = [each for name in order if (each := prompts.get(name) or rest.get(name))]
        load = replace(load, others=len(others))
        late = len({*load.ids, *prompts} - pacing.in_time(load, in_order, _COMING))
        if admitted or len(asked.best_effort):  # else no order has a row for them
            late += sum(one.id not in admitted and not one.is_soft for one in asked.new)
        promised = pacing.in_time(load, in_order, 0.0) if new else frozenset()
        found = replace(
            theirs,
            declined=tuple(one for one in asked.beyond if one not in tried),
            lost=asked.lost,
            order="first_come",
            why=(
                f"{late} might miss their objectives as they came; "
                f"{view.prediction_error:.0%} of predictions did not come true"
            ),
            promised=promised & {one.id for one in new},
        )
        return found, late

    # Admission of requests

    def _promoted(self) -> RequestTable | None:
        """Return the oldest best-effort request, if it has waited too long."""
        together = self.asked.beside
        if not len(together):
            return None
        oldest = together.take(together.arrived_s.argmin(axis=0, keepdims=True))
        return oldest if is_old(oldest, self.view, self.patience_ms)[0] else None

    def _beside(self, promoted: RequestTable) -> Pacing:
        """Return the pacing beside the promoted request's tokens, which become `fixed`."""
        load = self.asked.load
        tightest = min(load.tightest_ms, *(each.tpot_ms for each in load.prompts), math.inf)
        batch_ms = tightest if math.isfinite(tightest) else self.pacing.times.ms(256)
        part = max(self.least_chunk, self.pacing.times.tokens_within(batch_ms) // _SHARE)
        unread = int(promoted.unread[0])
        tokens = min(unread + 1, part) if unread else 1
        self.fixed = {int(promoted.id[0]): tokens}
        return self.pacing.beside(tokens)

    def _choose(self, pacing: Pacing, is_open: bool) -> Choice:
        free = self._victims()
        held = int(free.kv_tokens.sum())
        tokens = None if math.isinf(self.memory) else int(self.memory) + held
        memory = Memory(self.rows + len(free), tokens)
        return pacing.choose(self.asked.load, self.asked.new if is_open else (), memory)

    def _victims(self) -> RequestTable:
        """Return the requests that may be preempted, the youngest last."""
        kept = set(self.preempted)
        if self.promoted is not None:
            kept.add(int(self.promoted.id[0]))
        return self.asked.best_effort.take(~self.asked.best_effort.among(kept))

    def _admit(self, name: int, tokens: int) -> bool:
        """Admit a request if possible; it may preempt best-effort requests, the youngest first."""
        rows, memory, taken = self.rows, self.memory, list[int]()
        if rows < 1 or memory < tokens:
            victims = self._victims()
            youngest = zip(victims.id[::-1].tolist(), victims.kv_tokens[::-1].tolist(), strict=True)
            for victim, kv_tokens in youngest:
                taken.append(victim)
                rows, memory = rows + 1, memory + kv_tokens
                if rows >= 1 and memory >= tokens:
                    break
            else:
                return False
        self.preempted += taken
        self.rows, self.memory = rows - 1, memory - tokens
        self.admitted.append(name)
        return True

    def _admit_best_effort(self) -> None:
        """Admit best-effort requests in their order, if no other was preempted in this cycle."""
        if self.preempted:
            return
        waiting = self.asked.waiting
        for name, tokens in zip(waiting.id.tolist(), waiting.kv_tokens.tolist(), strict=True):
            if name in self.admitted:
                continue
            if self.rows < 1:
                return
            if tokens > self.memory:
                self.waits_for_memory = True
                return
            self.rows, self.memory = self.rows - 1, self.memory - tokens
            self.admitted.append(name)

    # The batch

    def written(self, load: Load, batch: Batch) -> Admission:
        """Return the admission with this batch; the planner chooses how requests decode in it."""
        found, _, _ = self.shared(load, batch)
        sitting_out = self._sitting_out(batch.spare, load.others)
        return replace(found, budget_ms=batch.longest_ms, paused=sitting_out)

    def shared(self, load: Load, batch: Batch) -> tuple[Admission, dict[int, int], int]:
        """Share the batch's room among all requests.

        Returns the admission without the batch's limits, the tokens that each decoding request
        verifies, by id, and the room that is left.
        """
        chunks = dict(zip((each.id for each in load.prompts), batch.chunks, strict=True))
        lengths = dict(zip(load.ids, batch.lengths.tolist(), strict=True))
        room = batch.room
        for name in sorted(load.ids, key=dict(zip(load.ids, load.due_ms, strict=True)).__getitem__):
            if not lengths[name] and room:
                lengths[name], room = 1, room - 1
        room = self._share(room, lengths, chunks)
        # Their prompts are read except for the last token: that one is decoded, or waits.
        running = self.view.running
        held = set(running.id[running.awaits_first & (running.unread == 0)].tolist())
        lengths |= {name: chunks.pop(name) for name in held & chunks.keys()}
        admission = Admission(
            admitted=tuple(self.admitted),
            chunks={name: chunk for name, chunk in chunks.items() if chunk},
            waits_for_memory=self.waits_for_memory,
            preempted=tuple(self.preempted),
            declined=self.asked.beyond,
        )
        return admission, lengths, room

    def _sitting_out(self, most: int | None, given_up: int) -> frozenset[int]:
        """Return the decoding requests without an objective that sit out, the last ones first.

        Up to `most` decode, including the `given_up` requests, which go on.
        """
        if most is None:
            return frozenset()
        most = max(0, most - given_up)
        others = self.asked.best_effort
        decoding = (others.unread == 0) & ~others.among({*self.preempted, *self.fixed})
        return frozenset(others.id[decoding][most:].tolist())

    def _share(self, room: int, lengths: dict[int, int], chunks: dict[int, int]) -> int:
        """Give the room to best-effort requests, promoted ones first, and return the rest.

        Each decoding request gets a token, then prompts get theirs.
        """
        asked, fixed = self.asked, self.fixed
        running = asked.best_effort.take(~asked.best_effort.among(self.preempted))
        together = running.joined(asked.waiting.take(asked.waiting.among(self.admitted)))
        unread = dict(zip(together.id.tolist(), together.unread.tolist(), strict=True))
        for name in [name for name, tokens in unread.items() if not tokens]:
            lengths[name] = fixed.get(name, min(1, room))
            room -= 0 if name in fixed else lengths[name]
        for name in sorted(unread, key=lambda each: each not in fixed):
            if unread[name]:
                own = fixed.get(name, 0)
                more = min(room, unread[name] + 1 - own)
                chunks[name], room = own + more, room - more
        return room


def by_objectives(
    pacing_of: PacingOf,
    prefill_chunk: int,
    *,
    patience_ms: float = 30_000.0,
    most_error: float = math.inf,
    make: type[Decision] = Decision,
) -> Admit:
    """Return the admission policy by objectives.

    Args:
        pacing_of: pacing of a view; it returns `Amortized` if `most_error` is finite.
        prefill_chunk: chunk of `fcfs`, which is followed if no request has an objective.
        patience_ms: wait after which a best-effort request comes first.
        most_error: follow `fcfs`, too, while it attains all objectives, or while at least this
            share of predictions is wrong; infinite: never.
        make: the class that decides.
    """
    as_they_came = fcfs(prefill_chunk)
    least_chunk = max(1, min(_LEAST_CHUNK, prefill_chunk // _SHARE))

    def policy(view: EngineView) -> Admission:
        if not (has_objective(view.running).any() or has_objective(view.waiting).any()):
            return as_they_came(view)
        pacing = pacing_of(view)
        decision = make(
            view=view,
            pacing=pacing,
            asked=sorted_requests(view, pacing, patience_ms),
            patience_ms=patience_ms,
            least_chunk=least_chunk,
        )
        # Predictions do not cover TPOT by runs of ten tokens, which only simulations judge.
        if math.isinf(most_error) or not np.isnan(view.running.run_ms).all():
            return decision.admission()
        first_come, late = decision.first_come(as_they_came)
        if not late or view.prediction_error >= most_error:
            return first_come
        return replace(decision.admission(), order="objectives", why=first_come.why)

    return policy
