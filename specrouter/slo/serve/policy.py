"""Admission by objectives: the policy `slo` (docs/admission.md), and what SLOs-Serve's is made of.

`slo` asks again as long as a request could attain its objective, where SLOs-Serve declines once and
for good. It lets no request starve: the oldest best-effort request that has waited `patience_ms`
has its row before anybody else is admitted, then a token in every batch, or an eighth of one for
its prompt. So it ends, at the latest, when `patience_ms` have passed, those that ran then have
ended, its prompt was read in such chunks and its output in as many batches as it has tokens; and
then the next one comes.

Pure: `(EngineView) -> Admission`. Source: SLOs-Serve (arXiv 2504.08784), sections 3 and 4.1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from specrouter.slo.admission import Admission, Admit, fcfs
from specrouter.slo.serve.amortized import Amortized
from specrouter.slo.serve.load import Load, Prompt
from specrouter.slo.serve.pacing import Batch, Choice, Pacing
from specrouter.slo.serve.program import Memory
from specrouter.slo.serve.requests import Sorted, by_key, has_objective, sorted_requests
from specrouter.slo.serve.reservation import with_prompts
from specrouter.view import EngineView, RequestView

PacingOf = Callable[[EngineView], Pacing]

_PROMOTED = 1  # best-effort requests that are served beside those with objectives
_SHARE = 8  # of a batch, of which a promoted prompt reads one
_LEAST_CHUNK = 16


def by_objectives(
    pacing_of: PacingOf,
    prefill_chunk: int,
    *,
    patience_ms: float = 30_000.0,
    is_final: bool = False,
    never_behind: bool = False,
) -> Admit:
    """Args:
    prefill_chunk: of `fcfs`, where no request has an objective.
    patience_ms: after which a best-effort request comes first.
    is_final: a request whose objective cannot be attained when it comes is best effort for good.
    never_behind: it does as `fcfs` does unless more requests attain their objectives otherwise;
        `pacing_of` gives `Amortized`.
    """
    without_objectives = fcfs(prefill_chunk)
    # Promoted prompts together leave half of what a cycle reads, however little that is.
    least_chunk = max(1, min(_LEAST_CHUNK, prefill_chunk // _SHARE))

    def policy(view: EngineView) -> Admission:
        if not any(map(has_objective, (*view.running, *view.waiting))):
            return without_objectives(view)
        pacing = pacing_of(view)
        decision = _Decision(
            view=view,
            pacing=pacing,
            patience_ms=patience_ms,
            is_final=is_final,
            least_chunk=least_chunk,
        )
        ours = decision.admission()
        # Of runs of ten tokens, which only simulations judge, its prediction knows too little.
        if not never_behind or any(one.run_ms is not None for one in view.running):
            return ours
        assert isinstance(pacing, Amortized), "strict pacing is as it was published"
        return decision.or_as_they_came(pacing, ours, without_objectives)

    return policy


@dataclass(kw_only=True)
class _Decision:
    """Of one view; thrown away afterwards."""

    view: EngineView
    pacing: Pacing
    patience_ms: float
    is_final: bool
    least_chunk: int  # of a promoted prompt
    rows: int = 0  # that are left
    memory: float = math.inf  # KV tokens that are left
    admitted: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    waits_for_memory: bool = False
    too_tight: frozenset[int] = frozenset()  # waiting, with a TPOT that nobody is promised now
    held_back: frozenset[int] = frozenset()  # of them, for the margin alone
    asked: Sorted = field(init=False)
    promoted: tuple[RequestView, ...] = ()
    fixed: dict[int, int] = field(default_factory=dict)  # tokens of promoted ones, by id
    load: Load = field(init=False)  # with whom it admits

    def admission(self) -> Admission:
        view, pacing = self.view, self.pacing
        self.asked = self._realistic(sorted_requests(view, pacing.times, pacing.fastest_ms))
        self.rows = view.free_rows
        self.memory = math.inf if view.kv_free_tokens is None else float(view.kv_free_tokens)
        self.promoted = self._promoted()
        have_rows = self._admit_promoted()
        pacing = self._beside()
        choice = self._choose(pacing, is_open=have_rows)
        if self.fixed and not choice.in_time:  # they wait for what is left until there is room
            pacing, self.fixed = self.pacing, {}
            choice = self._choose(pacing, is_open=False)
        came = [
            replace(prompt, is_running=True)
            for prompt in choice.admitted
            if self._admit(prompt.id, prompt.reserve_tokens)
        ]
        load = self.load = self.asked.load.without_neediest(choice.given_up).joined(came)
        batch = with_prompts(pacing, load, pacing.batch(load, choice.batch_ms))
        self._admit_best_effort()
        return replace(
            self._written(load, batch),
            promised=frozenset(prompt.id for prompt in came),
            held_back=len(self.held_back),
            lost=self.asked.lost,
        )

    # Or first come, first served

    def or_as_they_came(self, pacing: Amortized, ours: Admission, fcfs: Admit) -> Admission:
        """As they came, unless the prediction, believed as far as it came true, says that more
        requests attain their objectives with ours. Who is declined is, whatever is followed; but
        as they came, a TPOT that nobody would be promised is tried, as `fcfs` does."""
        declined = set(ours.declined)
        staying = [one for one in self.view.waiting if not (one.rejects and one.id in declined)]
        tried = self.too_tight.intersection(one.id for one in staying)
        theirs = fcfs(replace(self.view, waiting=tuple(staying)))
        admitted = set(theirs.admitted)
        as_fcfs = replace(
            theirs,
            declined=tuple(one for one in ours.declined if one not in tried),
            held_back=len(self.held_back & (declined - tried | admitted)),
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
        waiting = {one.id for one in self.asked.new if one.is_soft and one.id not in admitted}
        by_need = {one.id for one in self.asked.new if one.is_soft}
        if pacing.is_in_time(self.load):
            by_need.update(self.load.ids, (one.id for one in self.load.prompts))
        else:
            by_need |= pacing.in_time(self.load)
        gained, lost = len(by_need - as_they_came - waiting), len(as_they_came - by_need)
        error = self.view.prediction_error
        why = (
            f"{len(by_need)} requests attain their objectives by objectives, {len(as_they_came)} "
            f"as they came; {error:.0%} of predictions did not come true"
        )
        if gained * (1.0 - 2.0 * error) > lost * (1.0 + error):
            return replace(ours, order="objectives", why=why)
        promised = frozenset(as_they_came & {one.id for one in new})
        return replace(as_fcfs, order="first_come", why=why, promised=promised)

    # Who is admitted

    def _realistic(self, asked: Sorted) -> Sorted:
        """Who asks for a TPOT that it would not be promised though it were alone has nothing to
        wait for; who has waited too long is best effort, as long as it waits, or, without a
        deadline that would come, reads its prompt. Without such a deadline, who asks to be rejected
        is: its objective could not be attained all the time."""
        view, promised_ms = self.view, self.pacing.promised_ms
        asking = [one for one in asked.new if one.tpot_ms < promised_ms]
        beyond = tuple(one.id for one in asking)
        self.too_tight = frozenset(beyond)
        self.held_back = frozenset(
            one.id for one in asking if one.tpot_ms >= self.pacing.fastest_ms
        )
        is_new, reads = {one.id for one in asked.new}, {one.id for one in asked.load.prompts}
        waiting = [
            one
            for one in view.waiting
            if one.id in is_new and (one.id in beyond or self._is_old(one))
        ]
        running = [
            one
            for one in view.running
            if one.id in reads and self._is_old(one) and not one.has_deadline
        ]
        if not (waiting or running):
            return asked
        moved = {one.id for one in (*waiting, *running)}
        late = {one.id for one in waiting if one.rejects and not one.has_deadline}
        beyond = (*beyond, *sorted(late.difference(beyond)))
        waiting = [one for one in waiting if not (one.rejects and one.id in beyond)]
        prompts = tuple(one for one in asked.load.prompts if one.id not in moved)
        return replace(
            asked,
            load=replace(asked.load, prompts=prompts),
            new=tuple(one for one in asked.new if one.id not in moved),
            best_effort=by_key((*asked.best_effort, *running)),
            waiting=by_key((*asked.waiting, *waiting)),
            beyond=(*asked.beyond, *beyond),
        )

    def _is_old(self, request: RequestView) -> bool:
        return request.arrived_s <= self.view.now_s - self.patience_ms / 1000.0

    def _promoted(self) -> tuple[RequestView, ...]:
        """Best-effort requests that have waited too long, the oldest first."""
        together = (*self.asked.best_effort, *self.asked.waiting)
        oldest = sorted(together, key=lambda each: each.arrived_s)[:_PROMOTED]
        return tuple(filter(self._is_old, oldest))

    def _admit_promoted(self) -> bool:
        """Do all of them have rows now?"""
        return all(
            each.row is not None or self._admit(each.id, each.reserve_tokens)
            for each in self.promoted
        )

    def _beside(self) -> Pacing:
        """The pacing beside what promoted requests take of every batch, which is then `fixed`."""
        load, admitted = self.asked.load, self.admitted
        served = [each for each in self.promoted if each.row is not None or each.id in admitted]
        if not served:
            return self.pacing
        tightest = min(load.tightest_ms, *(each.tpot_ms for each in load.prompts), math.inf)
        batch_ms = tightest if math.isfinite(tightest) else self.pacing.times.ms(256)
        part = max(self.least_chunk, self.pacing.times.tokens_within(batch_ms) // _SHARE)
        self.fixed = {
            each.id: min(each.prompt_left + 1, part) if each.prompt_left else 1 for each in served
        }
        return self.pacing.beside(sum(self.fixed.values()))

    def _choose(self, pacing: Pacing, is_open: bool) -> Choice:
        free = self._victims()
        held = sum(each.reserve_tokens for each in free)
        tokens = None if math.isinf(self.memory) else int(self.memory) + held
        memory = Memory(self.rows + len(free), tokens)
        return pacing.choose(self.asked.load, self.asked.new if is_open else (), memory)

    def _victims(self) -> list[RequestView]:
        """Who may lose its row, the youngest last."""
        kept = {each.id for each in self.promoted} | set(self.preempted)
        return [each for each in self.asked.best_effort if each.id not in kept]

    def _admit(self, name: int, tokens: int) -> bool:
        """With the memory of best-effort requests, the youngest first, if there is no other."""
        victims, taken = self._victims(), list[int]()
        rows, memory = self.rows, self.memory
        while rows < 1 or memory < tokens:
            if not victims:
                return False
            victim = victims.pop()
            taken.append(victim.id)
            rows, memory = rows + 1, memory + victim.reserve_tokens
        self.preempted += taken
        self.rows, self.memory = rows - 1, memory - tokens
        self.admitted.append(name)
        return True

    def _admit_best_effort(self) -> None:
        """In their order, into rows and memory that nobody was preempted for."""
        for request in () if self.preempted else self.asked.waiting:
            if request.id in self.admitted:
                continue
            if self.rows < 1:
                return
            if request.reserve_tokens > self.memory:
                self.waits_for_memory = True
                return
            self.rows, self.memory = self.rows - 1, self.memory - request.reserve_tokens
            self.admitted.append(request.id)

    # What the batch does

    def _written(self, load: Load, batch: Batch) -> Admission:
        chunks = {
            prompt.id: chunk for prompt, chunk in zip(load.prompts, batch.chunks, strict=True)
        }
        lengths = dict(zip(load.ids, batch.lengths.tolist(), strict=True))
        room = batch.room
        for name in sorted(load.ids, key=dict(zip(load.ids, load.due_ms, strict=True)).__getitem__):
            if not lengths[name] and room:
                lengths[name], room = 1, room - 1
        room = self._share(room, lengths, chunks)
        # All but the last token of their prompts is read: that one is decoded, or waits.
        held = {one.id for one in self.view.running if one.awaits_first and not one.prompt_left}
        lengths |= {name: chunks.pop(name) for name in held & chunks.keys()}
        admission = Admission(
            admitted=tuple(self.admitted),
            chunks={name: chunk for name, chunk in chunks.items() if chunk},
            waits_for_memory=self.waits_for_memory,
            preempted=tuple(self.preempted),
            declined=self._declined(load),
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
        """Who decodes without an objective, beyond so many, the last ones first: less those that
        were given up, who go on."""
        if most is None:
            return frozenset()
        most = max(0, most - given_up)
        decoding = {one.id for one in self.view.running if not one.prompt_left}
        decoding -= set(self.preempted) | self.fixed.keys()
        return frozenset([one.id for one in self.asked.best_effort if one.id in decoding][most:])

    def _share(self, room: int, lengths: dict[int, int], chunks: dict[int, int]) -> int:
        """What is left goes to best-effort requests, promoted ones first: a token for each that
        decodes, then prompts. Returns what is left then."""
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

    def _declined(self, load: Load) -> tuple[int, ...]:
        if not self.is_final:
            return self.asked.beyond
        admitted = {each.id for each in load.prompts}
        late = (each.id for each in self.asked.new if each.id not in admitted)
        return (*self.asked.beyond, *late)


def _does(admission: Admission) -> Admission:
    """Without what is told of it."""
    return replace(admission, promised=frozenset(), declined=(), lost=(), held_back=0)
