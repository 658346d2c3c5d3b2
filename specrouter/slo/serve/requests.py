"""Sorted: the needs of a view's requests, those with objectives and those without: docs/routing.md.

`ttft_ms` counts until the first token has come; a request that loses its row then has its prompt to
read again, and no deadline for it. What is left of `e2e_ms` is shared between prompt and output in
proportion to their times on an idle machine, so that each may be slowed down by the same factor. No
request is declined for a length that is not known: the first outputs of a class show what is usual.
The tokens that are left make up for time lost or gained: those of its run of ten where TPOT is
judged by such runs, else those of its output or stage. Pure.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from specrouter.request.pace import RUN_TOKENS
from specrouter.slo.serve.load import EPS_MS, Load, Prompt, by_deadline
from specrouter.slo.serve.pacing import Pacing
from specrouter.view import EngineView, RequestView

_PATIENT = 2.0  # times the implied TTFT: after that, a first token comes before others' pace
PATIENCE_MS = 10_000.0  # for the first token, without a stated or implied TTFT


@dataclass(frozen=True, eq=False, kw_only=True)
class Sorted:
    """The requests of a view, sorted by what they need.

    Attributes:
        load: running requests with objectives.
        new: waiting ones that could attain theirs if they were alone.
        best_effort: running ones served as best effort, in the order of their keys.
        waiting: the same of waiting ones, without those that are to be rejected.
        beyond: ids of waiting ones whose objectives cannot be attained any more.
        too_tight: those of them whose TPOT is less than any promised now.
        held_back: those of them that only the margin excludes.
        lost: ids of running ones that were promised their objectives and will miss them.
    """

    load: Load
    new: tuple[Prompt, ...]
    best_effort: tuple[RequestView, ...]
    waiting: tuple[RequestView, ...]
    beyond: tuple[int, ...]
    too_tight: frozenset[int]
    held_back: frozenset[int]
    lost: tuple[int, ...]


# Of a decoding request: id, time until the next token is due, TPOT from now on, tokens left.
_Pace = tuple[int, float, float, float]


def has_objective(request: RequestView) -> bool:
    asked = (request.tpot_ms, request.ttft_ms, request.e2e_ms)
    return bool(request.stages) or any(each is not None for each in asked)


def is_old(request: RequestView, view: EngineView, patience_ms: float) -> bool:
    return request.arrived_s <= view.now_s - patience_ms / 1000.0


def sorted_requests(view: EngineView, pacing: Pacing, patience_ms: float = math.inf) -> Sorted:
    """Sort the requests of a view.

    A request that has waited for `patience_ms` is best effort as long as it waits, or, without a
    real deadline, reads its prompt.
    """
    needs = _Needs(view, pacing)
    load, best_effort, lost = _running(needs, view, patience_ms)
    new, waiting, beyond, too_tight, held_back = [], [], [], set(), set()
    for request in view.waiting:
        prompt = needs.of_waiting(request)
        if prompt is None:
            is_beyond = not request.declined and needs.asks(request)
        elif prompt.tpot_ms < pacing.promised_ms:  # even alone
            is_beyond = True
            too_tight.add(request.id)
            if prompt.tpot_ms >= pacing.fastest_ms:
                held_back.add(request.id)
        elif is_old(request, view, patience_ms):
            # Rejected without a deadline that could still come: never attainable so far.
            is_beyond = request.rejects and not request.has_deadline
        else:
            new.append(prompt)
            continue
        if is_beyond:
            beyond.append(request.id)
        if not (is_beyond and request.rejects):
            waiting.append(request)
    return Sorted(
        load=load,
        new=tuple(new),
        best_effort=_by_key(best_effort),
        waiting=_by_key(waiting),
        beyond=tuple(beyond),
        too_tight=frozenset(too_tight),
        held_back=frozenset(held_back),
        lost=tuple(lost),
    )


def _running(
    needs: "_Needs", view: EngineView, patience_ms: float
) -> tuple[Load, list[RequestView], list[int]]:
    """Return the load of running requests, the best-effort ones, and the ids of lost promises."""
    prompts: list[Prompt] = []
    decoding: list[_Pace] = []
    best_effort, lost = [], []
    for request in view.running:
        need = needs.of_running(request)
        if isinstance(need, tuple):
            decoding.append(need)
        elif need and (request.has_deadline or not is_old(request, view, patience_ms)):
            prompts.append(need)
        else:
            best_effort.append(request)
            if need is None and request.promised and needs.has_pace(request):
                lost.append(request.id)
    ids, due_ms, tpot_ms, left = np.array(decoding, dtype=np.float64).reshape(-1, 4).T
    load = Load(
        ids=tuple(ids.astype(int).tolist()),
        due_ms=due_ms,
        tpot_ms=tpot_ms,
        left=left,
        prompts=by_deadline(prompts),
    )
    return load, best_effort, lost


def _by_key(requests: Iterable[RequestView]) -> tuple[RequestView, ...]:
    return tuple(sorted(requests, key=lambda each: each.priority_key))


class _Needs:
    """The needs of a view's requests; None: no objective, or none that can be attained any more."""

    def __init__(self, view: EngineView, pacing: Pacing) -> None:
        self._view, self._times, self._fastest_ms = view, pacing.times, pacing.fastest_ms

    def of_running(self, request: RequestView) -> Prompt | _Pace | None:
        targets = self._targets(request)
        if targets is None:
            return None
        is_reading = request.prompt_left or request.awaits_first
        return self._prompt(request, *targets) if is_reading else self._pace(request, targets[1])

    def of_waiting(self, request: RequestView) -> Prompt | None:
        targets = self._targets(request)
        if targets is None:
            return None
        has_pace = not request.decode_ms or math.isinf(targets[1])
        has_pace = has_pace or self._pace(request, targets[1]) is not None
        # It may have missed its pace before it was preempted.
        return self._prompt(request, *targets) if has_pace else None

    def has_pace(self, request: RequestView) -> bool:
        """Return whether the request has a TPOT; without one, the first token was all it asked."""
        targets = self._targets(request)
        return targets is not None and math.isfinite(targets[1])

    def asks(self, request: RequestView) -> bool:
        """Return whether the request has an objective for what is still to come."""
        if not request.decode_ms:
            return has_objective(request)
        latency = request.e2e_ms is not None and self._is_length_known(request)
        return bool(request.stages) or request.tpot_ms is not None or latency

    def _targets(self, request: RequestView) -> tuple[float, float] | None:
        """Return TTFT from the arrival and TPOT of the output, infinite where there is none.

        None: it has no objective, or none any more, or one that no machine could attain.
        """
        if request.declined or not self.asks(request):
            return None
        tpots = [stage.tpot_ms for stage in request.stages] or [request.tpot_ms or math.inf]
        tpot_ms, ttft_ms = min(tpots), request.ttft_ms or math.inf
        if request.e2e_ms is not None:
            shares = self._shares(request, request.e2e_ms)
            if shares is None:
                return None
            ttft_ms, tpot_ms = min(ttft_ms, shares[0]), min(tpot_ms, shares[1])
        if tpot_ms < EPS_MS:
            return None
        # With larger values, sums and products would not be finite; a TPOT of decades is none.
        tpot_ms = tpot_ms if tpot_ms < 1e12 else math.inf
        has_deadline = math.isfinite(ttft_ms) and not request.decode_ms
        return min(ttft_ms, 1e12) if has_deadline else math.inf, tpot_ms

    def _is_length_known(self, request: RequestView) -> bool:
        return request.output_tokens is not None or request.tier in self._view.output_tokens

    def _output_tokens(self, request: RequestView) -> float:
        """Return the length of the output, or an upper bound if it is not known."""
        if request.output_tokens is not None:
            return float(request.output_tokens)
        most = float(request.max_new_tokens)
        return min(most, self._view.output_tokens.get(request.tier, most))

    def _shares(self, request: RequestView, e2e_ms: float) -> tuple[float, float] | None:
        """Return TTFT and TPOT that an end-to-end latency leaves; None: not enough for either."""
        if not self._is_length_known(request):
            return e2e_ms, math.inf
        waited_ms = self._waited_ms(request)
        output_tokens = self._output_tokens(request)
        if request.decode_ms:  # a TPOT counts from where `decoded` does: the start of the stage
            left = max(1.0, output_tokens - (request.max_new_tokens - request.remaining))
            left_ms = max(0.0, e2e_ms - waited_ms)
            return math.inf, (left_ms + request.decode_ms) / (request.decoded + left)
        outputs = max(1.0, output_tokens - 1.0)
        prompt_ms, token_ms = self._times.ms(request.prompt_left + 1), self._times.ms(1)
        factor = (e2e_ms - waited_ms) / (prompt_ms + outputs * token_ms)
        return None if factor < 1.0 else (waited_ms + factor * prompt_ms, factor * token_ms)

    def _waited_ms(self, request: RequestView) -> float:
        return 1000.0 * (self._view.now_s - request.arrived_s)

    def _prompt(self, request: RequestView, ttft_ms: float, tpot_ms: float) -> Prompt | None:
        needs_ms, waited_ms = self._times.ms(request.prompt_left + 1), self._waited_ms(request)
        deadline_ms, can_wait = ttft_ms - waited_ms, False
        if math.isinf(ttft_ms):
            # An implied TTFT counts until the first token has come.
            implied_ms = None if request.decode_ms else request.implied_ttft_ms
            deadline_ms = max((implied_ms or PATIENCE_MS) - waited_ms, 2.0 * needs_ms)
            can_wait = waited_ms < _PATIENT * (implied_ms or math.inf)
        elif deadline_ms < needs_ms - EPS_MS:
            return None
        return Prompt(
            id=request.id,
            deadline_ms=deadline_ms,
            tokens=request.prompt_left + 1,
            tpot_ms=tpot_ms,
            kv_tokens=request.kv_tokens,
            is_running=request.row is not None,
            left=max(1.0, self._output_tokens(request) - 1.0),
            is_soft=math.isinf(ttft_ms),
            can_wait=can_wait,
        )

    def _left(self, request: RequestView) -> float:
        """Return how many tokens are left of those that its TPOT is judged by, at least one."""
        if request.run_ms is not None:
            left = float(RUN_TOKENS - request.decoded % RUN_TOKENS)
        elif request.stages and request.stages[0].until_tokens is not None:
            left = float(request.stages[0].until_tokens - request.decoded)
        elif request.stages:  # the last stage; `decoded` does not count those before
            done = request.max_new_tokens - request.remaining
            left = self._output_tokens(request) - done
        else:
            left = self._output_tokens(request) - request.decoded - 1.0
        return max(1.0, min(left, float(request.remaining)))

    def _pace(self, request: RequestView, tpot_ms: float) -> _Pace | None:
        """Return the pace that a decoding request needs; None if it has none or cannot keep it.

        Where TPOT is judged by runs of ten tokens, a run that fell behind should be on time at its
        end. Else it is the mean over the output, and time gained or lost so far is spread over the
        rest.
        """
        if math.isinf(tpot_ms):
            return None
        left = self._left(request)
        tightest_ms = tpot_ms
        if request.stages:
            tpot_ms = min(request.stages[0].tpot_ms, 1e12)
        if request.run_ms is None:
            pace_ms = tpot_ms + (request.decoded * tpot_ms - request.decode_ms) / left
            due_ms = pace_ms = min(pace_ms, tightest_ms) if request.stages else pace_ms
        else:
            due_ms = (request.decoded % RUN_TOKENS + 1) * tpot_ms - request.run_ms
            pace_ms = tightest_ms
            if due_ms < self._fastest_ms:
                due_ms = (due_ms + (left - 1) * tpot_ms) / left
                pace_ms = min(due_ms, tightest_ms)
        if due_ms < self._fastest_ms:
            return None
        return request.id, due_ms, pace_ms, left
