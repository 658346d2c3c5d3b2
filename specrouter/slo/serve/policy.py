"""Admission by objectives: the policy `slo` (docs/routing.md), and the parts of SLOs-Serve's.

`slo` reconsiders a request as long as it could attain its objective. No request starves: the oldest
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
from specrouter.slo.serve.admission_dp import Memory
from specrouter.slo.serve.amortized import Amortized
from specrouter.slo.serve.load import Load, Prompt
from specrouter.slo.serve.pacing import Batch, Choice, Pacing
from specrouter.slo.serve.requests import Sorted, has_objective, is_old, sorted_requests
from specrouter.slo.serve.reservation import with_prompts
from specrouter.view import EngineView, RequestTable

PacingOf = Callable[[EngineView], Pacing]

_SHARE = 8  # a promoted prompt reads one part in 8 of a batch
_LEAST_CHUNK = 16


def by_objectives(
    pacing_of: PacingOf,
    prefill_chunk: int,
    *,
    patience_ms: float = 30_000.0,
    never_behind: bool = False,
) -> Admit:
    """Return the admission policy by objectives.

    Args:
        pacing_of: pacing of a view.
        prefill_chunk: chunk of `fcfs`, which is followed if no request has an objective.
        patience_ms: wait after which a best-effort request comes first.
        never_behind: follow `fcfs` unless more requests attain their objectives otherwise;
            `pacing_of` returns `Amortized`.
    """
    without_objectives = fcfs(prefill_chunk)
    least_chunk = max(1, min(_LEAST_CHUNK, prefill_chunk // _SHARE))

    def policy(view: EngineView) -> Admission:
        if not (has_objective(view.running).any() or has_objective(view.waiting).any()):
            return without_objectives(view)
        pacing = pacing_of(view)
        decision = _Decision(
            view=view, pacing=pacing, patience_ms=patience_ms, least_chunk=least_chunk
        )
        ours = decision.admission()
        # The prediction does not cover TPOT by runs of ten tokens, which only simulations judge.
        if not never_behind or not np.isnan(view.running.run_ms).all():
            return ours
        assert isinstance(pacing, Amortized), "strict pacing is as it was published"
        return decision.or_as_they_came(pacing, ours, without_objectives)

    return policy


@dataclass(kw_only=True)
class _Decision:
    view: EngineView
    pacing: Pacing
    patience_ms: float
    least_chunk: int  # chunk of a promoted prompt
    rows: int = 0  # free
    memory: float = math.inf  # free KV tokens
    admitted: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    waits_for_memory: bool = False
    asked: Sorted = field(init=False)
    promoted: RequestTable | None = None  # a single request
    fixed: dict[int, int] = field(default_factory=dict)  # tokens of the promoted request, by id
    load: Load = field(init=False)  # with the admitted prompts

    def admission(self) -> Admission:
        view, pacing = self.view, self.pacing
        self.asked = sorted_requests(view, pacing, self.patience_ms)
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
        load = self.load = self.asked.load.without_neediest(choice.given_up).joined(came)
        batch = with_prompts(pacing, load, pacing.batch(load, choice.batch_ms))
        self._admit_best_effort()
        kept = self.promoted.id if self.promoted is not None else ()
        beside = np.setdiff1d(self.asked.beside.id, kept)
        return replace(
            self._written(load, batch),
            ranks=dict.fromkeys(beside.tolist(), 1.0),
            promised=frozenset(prompt.id for prompt in came),
            held_back=len(self.asked.held_back),
            lost=self.asked.lost,
        )

    # The alternative: first come, first served

    def or_as_they_came(self, pacing: Amortized, ours: Admission, fcfs: Admit) -> Admission:
        """Return `fcfs`'s admission, unless `ours` is predicted to attain more objectives.

        The prediction counts less the less it came true. Declined requests stay declined in both
        cases. But `fcfs` tries requests that were declined for a TPOT that is too tight for any
        promise.
        """
        view, asked = self.view, self.asked
        declined = set(ours.declined)
        staying = view.waiting.take(~(view.waiting.rejects & view.waiting.among(declined)))
        tried = asked.too_tight.intersection(staying.id.tolist())
        theirs = fcfs(replace(view, waiting=staying))
        admitted = set(theirs.admitted)
        as_fcfs = replace(
            theirs,
            declined=tuple(one for one in ours.declined if one not in tried),
            held_back=len(asked.held_back & (declined - tried | admitted)),
            lost=ours.lost,
        )
        if _does(ours) == _does(theirs):
            return replace(as_fcfs, promised=ours.promised)
        new = [one for one in asked.new if one.id in admitted]
        load = asked.load.joined(new)
        prompts = {one.id: one for one in load.prompts}
        order = view.running.id.tolist() + list(theirs.admitted)
        unpaced = asked.beside
        others = unpaced.take((unpaced.row >= 0) | unpaced.among(admitted))
        rest = {
            name: Prompt(id=name, deadline_ms=math.inf, tokens=unread + 1,
                         tpot_ms=math.inf, is_soft=True)
            for name, unread in zip(others.id.tolist(), others.unread.tolist(), strict=True)
            if unread
        }  # fmt: skip
        in_order = [each for name in order if (each := prompts.get(name) or rest.get(name))]
        load = replace(load, others=len(others))
        as_they_came = pacing.in_time(load, in_order) - rest.keys()
        may_wait = {one.id for one in self.asked.new if one.is_soft}
        by_need = set(may_wait)
        if pacing.is_in_time(self.load):
            by_need.update(self.load.ids, (one.id for one in self.load.prompts))
        else:
            by_need |= pacing.in_time(self.load)
        gained = len(by_need - as_they_came - (may_wait - admitted))
        lost = len(as_they_came - by_need)
        error = self.view.prediction_error
        why = (
            f"{len(by_need)} requests attain their objectives by objectives, {len(as_they_came)} "
            f"as they came; {error:.0%} of predictions did not come true"
        )
        if gained * (1.0 - 2.0 * error) > lost * (1.0 + error):
            return replace(ours, order="objectives", why=why)
        promised = frozenset(as_they_came & {one.id for one in new})
        return replace(as_fcfs, order="first_come", why=why, promised=promised)

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

    def _written(self, load: Load, batch: Batch) -> Admission:
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
        if self.pacing.leaves_decoding and not batch.paces_decoding:
            return replace(
                admission,
                budget_ms=batch.longest_ms,
                paused=self._sitting_out(batch.spare, load.others),
            )
        return replace(
            admission,
            paused=frozenset(name for name, length in lengths.items() if not length),
            depths={name: max(0, length - 1) for name, length in lengths.items()},
            budget_nodes=room + sum(max(0, length - 1) for length in lengths.values()),
            budget_ms=batch.ms,
        )

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


def _does(admission: Admission) -> Admission:
    """Return the admission without the fields that do not change the cycle."""
    return replace(admission, promised=frozenset(), declined=(), lost=(), held_back=0)
