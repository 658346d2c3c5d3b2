"""Sorted: what a view's requests need, those with objectives and those without: docs/admission.md.

`ttft_ms` is asked until the first token has come; a request that loses its row then has its prompt
to read again, and no deadline for it. What is left of `e2e_ms` is shared between prompt and output
in proportion to their times on an idle machine, so that each may be slowed down by the same factor.
Nobody is declined for a length that nobody knows: the first outputs of a class show what is usual.
What a request is behind, or ahead, is made good by the tokens that are left: those of its run of
ten where TPOT is judged by such runs, else those of its output or stage. Pure.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from specrouter.profile.batch_time import BatchTime
from specrouter.request.attainment import RUN_TOKENS
from specrouter.slo.serve.load import EPS_MS, Load, Prompt, by_deadline
from specrouter.view import EngineView, RequestView

_PATIENT = 2.0  # times the implied TTFT, after which a first token comes before others' pace
PATIENCE_MS = 10_000.0  # for the first token of requests of which nothing is asked or implied


@dataclass(frozen=True, eq=False, kw_only=True)
class Sorted:
    """Attributes:
    load: of running requests with objectives.
    new: waiting ones that could attain theirs if they were alone.
    best_effort: running ones without, or beyond, objectives, in the order of their keys.
    waiting: the same of waiting ones, without those that are to be rejected.
    beyond: ids of waiting ones whose objectives cannot be attained any more.
    lost: ids of running ones that were promised theirs, and attain them no more.
    """

    load: Load
    new: tuple[Prompt, ...]
    best_effort: tuple[RequestView, ...]
    waiting: tuple[RequestView, ...]
    beyond: tuple[int, ...]
    lost: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Targets:
    """`ttft_ms` from the arrival, `tpot_ms` of the output; infinite where there is none."""

    ttft_ms: float
    tpot_ms: float
    has_deadline: bool


def has_objective(request: RequestView) -> bool:
    asked = (request.tpot_ms, request.ttft_ms, request.e2e_ms)
    return bool(request.stages) or any(each is not None for each in asked)


def sorted_requests(view: EngineView, times: BatchTime, fastest_ms: float) -> Sorted:
    """`fastest_ms`: TPOT that a request alone attains."""
    prompts, new, best_effort, waiting, beyond, lost = [], [], [], [], [], []
    decoding: list[tuple[int, float, float, float]] = []
    for request in view.running:
        targets = None if request.declined else _targets(request, view, times)
        if targets is not None and (request.prompt_left or request.awaits_first):
            prompt = _prompt(request, targets, view, times)
            if prompt is not None:
                prompts.append(prompt)
                continue
        elif targets is not None and math.isfinite(targets.tpot_ms):
            pace = _pace(request, targets, view, fastest_ms)
            if pace is not None:
                decoding.append((request.id, *pace, _left(request, view)))
                continue
        best_effort.append(request)
        # One whose first token was all that it asked has had it.
        if request.promised and targets is not None and math.isfinite(targets.tpot_ms):
            lost.append(request.id)
    for request in view.waiting:
        targets = None if request.declined else _targets(request, view, times)
        prompt = None if targets is None else _prompt(request, targets, view, times)
        is_behind = targets is not None and _is_behind(request, targets, view, fastest_ms)
        if prompt is not None and not is_behind:
            new.append(prompt)
            continue
        is_beyond = _asks(request, view) and not request.declined
        if is_beyond:
            beyond.append(request.id)
        if not (is_beyond and request.rejects):
            waiting.append(request)
    return Sorted(
        load=_load(decoding, prompts),
        new=tuple(new),
        best_effort=by_key(best_effort),
        waiting=by_key(waiting),
        beyond=tuple(beyond),
        lost=tuple(lost),
    )


def _load(decoding: Sequence[tuple[int, float, float, float]], prompts: Iterable[Prompt]) -> Load:
    """Of those that decode: id, when the next token is due, TPOT, and tokens that are left."""
    columns = np.array([each[1:] for each in decoding], dtype=np.float64).reshape(-1, 3).T
    due_ms, tpot_ms, left = columns
    return Load(
        ids=tuple(each[0] for each in decoding),
        due_ms=due_ms,
        tpot_ms=tpot_ms,
        left=left,
        prompts=by_deadline(prompts),
    )


def by_key(requests: Iterable[RequestView]) -> tuple[RequestView, ...]:
    return tuple(sorted(requests, key=lambda each: each.priority_key))


def _asks(request: RequestView, view: EngineView) -> bool:
    """Of what is still to come."""
    if not request.decode_ms:
        return has_objective(request)
    latency = request.e2e_ms is not None and _is_length_known(request, view)
    return bool(request.stages) or request.tpot_ms is not None or latency


def _targets(request: RequestView, view: EngineView, times: BatchTime) -> _Targets | None:
    """None: it asks for nothing, or nothing any more, or for what no machine could attain."""
    if not _asks(request, view):
        return None
    tpots = [stage.tpot_ms for stage in request.stages] or [request.tpot_ms or math.inf]
    tpot_ms, ttft_ms = min(tpots), request.ttft_ms or math.inf
    if request.e2e_ms is not None:
        shares = _shares(request, request.e2e_ms, view, times)
        if shares is None:
            return None
        ttft_ms, tpot_ms = min(ttft_ms, shares[0]), min(tpot_ms, shares[1])
    if tpot_ms < EPS_MS:
        return None
    if request.decode_ms:
        ttft_ms = math.inf
    # Of larger ones, sums and products would not be finite; a TPOT of decades is none.
    tpot_ms = tpot_ms if tpot_ms < 1e12 else math.inf
    return _Targets(min(ttft_ms, 1e12), tpot_ms, math.isfinite(ttft_ms))


def _is_length_known(request: RequestView, view: EngineView) -> bool:
    return request.output_tokens is not None or request.tier in view.output_tokens


def _shares(
    request: RequestView, e2e_ms: float, view: EngineView, times: BatchTime
) -> tuple[float, float] | None:
    """TTFT and TPOT that an end-to-end latency leaves; None: not enough for either."""
    if not _is_length_known(request, view):
        return e2e_ms, math.inf
    waited_ms = 1000.0 * (view.now_s - request.arrived_s)
    output_tokens = _output_tokens(request, view)
    if request.decode_ms:  # a TPOT counts from where `decoded` does: the stage's begin
        left = max(1.0, output_tokens - (request.max_new_tokens - request.remaining))
        left_ms = max(0.0, e2e_ms - waited_ms)
        return math.inf, (left_ms + request.decode_ms) / (request.decoded + left)
    outputs = max(1.0, output_tokens - 1.0)
    prompt_ms, token_ms = times.ms(request.prompt_left + 1), times.ms(1)
    factor = (e2e_ms - waited_ms) / (prompt_ms + outputs * token_ms)
    return None if factor < 1.0 else (waited_ms + factor * prompt_ms, factor * token_ms)


def _output_tokens(request: RequestView, view: EngineView) -> float:
    """The most that it may be, where it is not known."""
    if request.output_tokens is not None:
        return float(request.output_tokens)
    return min(
        float(request.max_new_tokens),
        view.output_tokens.get(request.tier, float(request.max_new_tokens)),
    )


def _left(request: RequestView, view: EngineView) -> float:
    """Tokens that are still to come of what its TPOT is judged by, at least one."""
    if request.run_ms is not None:
        left = float(RUN_TOKENS - request.decoded % RUN_TOKENS)
    elif request.stages and request.stages[0].until_tokens is not None:
        left = float(request.stages[0].until_tokens - request.decoded)
    elif request.stages:  # the last one, in which `decoded` counts none of those before
        left = _output_tokens(request, view) - (request.max_new_tokens - request.remaining)
    else:
        left = _output_tokens(request, view) - request.decoded - 1.0
    return max(1.0, min(left, float(request.remaining)))


def _prompt(
    request: RequestView, targets: _Targets, view: EngineView, times: BatchTime
) -> Prompt | None:
    """None: its deadline has come too near."""
    tokens = request.prompt_left + 1
    needs_ms = times.ms(tokens)
    waited_ms = 1000.0 * (view.now_s - request.arrived_s)
    output_tokens = _output_tokens(request, view)
    implied_ms = None if request.decode_ms else request.implied_ttft_ms  # until it has come
    if targets.has_deadline:
        deadline_ms = targets.ttft_ms - waited_ms
        if deadline_ms < needs_ms - EPS_MS:
            return None
    else:
        deadline_ms = max((implied_ms or PATIENCE_MS) - waited_ms, 2.0 * needs_ms)
    is_running = request.row is not None
    return Prompt(
        id=request.id,
        deadline_ms=deadline_ms,
        tokens=tokens,
        tpot_ms=targets.tpot_ms,
        reserve_tokens=request.reserve_tokens,
        is_running=is_running,
        left=max(1.0, output_tokens - 1.0),
        is_soft=not targets.has_deadline,
        can_wait=not targets.has_deadline and waited_ms < _PATIENT * (implied_ms or math.inf),
    )


def _is_behind(
    request: RequestView, targets: _Targets, view: EngineView, fastest_ms: float
) -> bool:
    """Has it lost its TPOT in the row that was taken from it?"""
    if not request.decode_ms or math.isinf(targets.tpot_ms):
        return False
    return _pace(request, targets, view, fastest_ms) is None


def _pace(
    request: RequestView, targets: _Targets, view: EngineView, fastest_ms: float
) -> tuple[float, float] | None:
    """When the next token is due, and the TPOT from now on; None: it cannot be on time any more.

    Where TPOT is judged by runs of ten tokens, a run that fell behind is to be on time at its end.
    Else it is the mean over the output, and what was gained or lost so far is spread over the rest.
    """
    tpot_ms = min(request.stages[0].tpot_ms, 1e12) if request.stages else targets.tpot_ms
    if request.run_ms is None:
        left = _left(request, view)
        pace_ms = tpot_ms + (request.decoded * tpot_ms - request.decode_ms) / left
        if request.stages:
            pace_ms = min(pace_ms, targets.tpot_ms)
        return None if pace_ms < fastest_ms else (pace_ms, pace_ms)
    done = request.decoded % RUN_TOKENS
    due_ms = (done + 1) * tpot_ms - request.run_ms
    if due_ms >= fastest_ms:
        return due_ms, targets.tpot_ms
    left = max(1, min(RUN_TOKENS - done, request.remaining))
    strengthened_ms = (due_ms + (left - 1) * tpot_ms) / left
    if strengthened_ms < fastest_ms:
        return None
    return strengthened_ms, min(strengthened_ms, targets.tpot_ms)
