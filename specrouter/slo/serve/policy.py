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

from specrouter.slo.admission import Admission, Admit, fcfs
from specrouter.slo.serve.admission_dp import Memory
from specrouter.slo.serve.amortized import Amortized
from specrouter.slo.serve.load import Load, Prompt
from specrouter.slo.serve.pacing import Batch, Choice, Pacing
from specrouter.slo.serve.requests import Sorted, has_objective, is_old, sorted_requests
from specrouter.slo.serve.reservation import with_prompts
from specrouter.view import EngineView, RequestView

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
        if not any(map(has_objective, (*view.running, *view.waiting))):
            return without_objectives(view)
        pacing = pacing_of(view)
        decision = _Decision(
            view=view, pacing=pacing, patience_ms=patience_ms, least_chunk=least_chunk
        )
        ours = decision.admission()
        # The prediction does not cover TPOT by runs of ten tokens, which only simulations judge.
        if not never_behind or any(one.run_ms is not None for one in view.running):
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
    promoted: RequestView | None = None
    fixed: dict[int, int] = field(default_factory=dict)  # tokens of the promoted request, by id
    load: Load = field(init=False)  # with the admitted prompts

    def admission(self) -> Admission:
        view, pacing = self.view, self.pacing
        self.asked = sorted_requests(view, pacing, self.patience_ms)
        self.rows = view.free_rows
        self.memory = math.inf if view.kv_free_tokens is None else float(view.kv_free_tokens)
        self.promoted = self._promoted()
        one = self.promoted
        has_row = not one or one.row is not None or self._admit(one.id, one.kv_tokens)
        if one and has_row:
            pacing = self._beside(one)
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
        beside = (*self.asked.best_effort, *self.asked.waiting)
        return replace(
            self._written(load, batch),
            ranks={each.id: 1.0 for each in beside if each is not self.promoted},
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
        declined = set(ours.declined)
        staying = [one for one in self.view.waiting if not (one.rejects and one.id in declined)]
        tried = self.asked.too_tight.intersection(one.id for one in staying)
        theirs = fcfs(replace(self.view, waiting=tuple(staying)))
        admitted = set(theirs.admitted)
        as_fcfs = replace(
            theirs,
            declined=tuple(one for one in ours.declined if one not in tried),
            held_back=len(self.asked.held_back & (declined - tried | admitted)),
            lost=ours.lost,
        )
        if _does(ours) == _does(theirs):
            return replace(as_fcfs, promised=ours.promised)
        new = [one for one in self.asked.new if one.id in admitted]
        load = self.asked.load.joined(new)
        prompts = {one.id: one for one in load.prompts}
        order = [one.id for one in self.view.running] + list(theirs.admitted)
        unpaced = (*self.asked.best_effort, *self.asked.waiting)
        others = [one for one in unpaced if one.row is not None or one.id in admitted]
        rest = {
            one.id: Prompt(id=one.id, deadline_ms=math.inf, tokens=one.prompt_left + 1,
                           tpot_ms=math.inf, is_soft=True)
            for one in others if one.prompt_left
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

    def _promoted(self) -> RequestView | None:
        """Return the oldest best-effort request, if it has waited too long."""
        together = (*self.asked.best_effort, *self.asked.waiting)
        oldest = min(together, key=lambda each: each.arrived_s, default=None)
        return oldest if oldest and is_old(oldest, self.view, self.patience_ms) else None

    def _beside(self, promoted: RequestView) -> Pacing:
        """Return the pacing beside the promoted request's tokens, which become `fixed`."""
        load = self.asked.load
        tightest = min(load.tightest_ms, *(each.tpot_ms for each in load.prompts), math.inf)
        batch_ms = tightest if math.isfinite(tightest) else self.pacing.times.ms(256)
        part = max(self.least_chunk, self.pacing.times.tokens_within(batch_ms) // _SHARE)
        tokens = min(promoted.prompt_left + 1, part) if promoted.prompt_left else 1
        self.fixed = {promoted.id: tokens}
        return self.pacing.beside(tokens)

    def _choose(self, pacing: Pacing, is_open: bool) -> Choice:
        free = self._victims()
        held = sum(each.kv_tokens for each in free)
        tokens = None if math.isinf(self.memory) else int(self.memory) + held
        memory = Memory(self.rows + len(free), tokens)
        return pacing.choose(self.asked.load, self.asked.new if is_open else (), memory)

    def _victims(self) -> list[RequestView]:
        """Return the requests that may be preempted, the youngest last."""
        kept = set(self.preempted) | {self.promoted.id if self.promoted else None}
        return [each for each in self.asked.best_effort if each.id not in kept]

    def _admit(self, name: int, tokens: int) -> bool:
        """Admit a request if possible; it may preempt best-effort requests, the youngest first."""
        victims, taken = self._victims(), list[int]()
        rows, memory = self.rows, self.memory
        while rows < 1 or memory < tokens:
            if not victims:
                return False
            victim = victims.pop()
            taken.append(victim.id)
            rows, memory = rows + 1, memory + victim.kv_tokens
        self.preempted += taken
        self.rows, self.memory = rows - 1, memory - tokens
        self.admitted.append(name)
        return True

    def _admit_best_effort(self) -> None:
        """Admit best-effort requests in their order, if no other was preempted in this cycle."""
        for request in () if self.preempted else self.asked.waiting:
            if request.id in self.admitted:
                continue
            if self.rows < 1:
                return
            if request.kv_tokens > self.memory:
                self.waits_for_memory = True
                return
            self.rows, self.memory = self.rows - 1, self.memory - request.kv_tokens
            self.admitted.append(request.id)

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
        held = {one.id for one in self.view.running if one.awaits_first and not one.prompt_left}
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
        decoding = {one.id for one in self.view.running if not one.prompt_left}
        decoding -= set(self.preempted) | self.fixed.keys()
        return frozenset([one.id for one in self.asked.best_effort if one.id in decoding][most:])

    def _share(self, room: int, lengths: dict[int, int], chunks: dict[int, int]) -> int:
        """Give the room to best-effort requests, promoted ones first, and return the rest.

        Each decoding request gets a token, then prompts get theirs.
        """
        came = [each for each in self.asked.waiting if each.id in self.admitted]
        running = [each for each in self.asked.best_effort if each.id not in self.preempted]
        together, fixed = (*running, *came), self.fixed
        for request in together:
            if not request.prompt_left:
                lengths[request.id] = fixed.get(request.id, min(1, room))
                room -= 0 if request.id in fixed else lengths[request.id]
        for request in sorted(together, key=lambda each: each.id not in fixed):
            if request.prompt_left:
                own = fixed.get(request.id, 0)
                more = min(room, request.prompt_left + 1 - own)
                chunks[request.id], room = own + more, room - more
        return room


def _does(admission: Admission) -> Admission:
    """Return the admission without the fields that do not change the cycle."""
    return replace(admission, promised=frozenset(), declined=(), lost=(), held_back=0)
