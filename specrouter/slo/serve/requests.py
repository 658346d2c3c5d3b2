"""Sorted: the needs of a view's requests, those with objectives and those without: docs/routing.md.

`ttft_ms` counts until the first token has come; a request that loses its row then has its prompt to
read again, and no deadline for it. What is left of `e2e_ms` is shared between prompt and output in
proportion to their times on an idle machine, so that each may be slowed down by the same factor. No
request is declined for a length that is not known: the first outputs of a class show what is usual.
The tokens that are left make up for time lost or gained: those of its run of ten where TPOT is
judged by such runs, else those of its output or stage. Pure.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specrouter.request.pace import RUN_TOKENS
from specrouter.slo.serve.load import EPS_MS, Bools, Floats, Load, Prompt, by_deadline
from specrouter.slo.serve.pacing import Pacing
from specrouter.view import EngineView, RequestTable

_PATIENT = 2.0  # times the implied TTFT: after that, a first token comes before others' pace
PATIENCE_MS = 10_000.0  # for the first token, without a stated or implied TTFT
_DECADES_MS = 1e12


@dataclass(frozen=True, eq=False, kw_only=True)
class Sorted:
    """The requests of a view, sorted by what they need.

    Attributes:
        load: running requests with objectives.
        best_effort: running ones served as best effort, in the order of their keys.
        waiting: the same of waiting ones, without those that are to be rejected.
        lost: ids of running ones that were promised their objectives and will miss them.
        new: waiting ones that could attain their objectives if they were alone.
        beyond: ids of waiting ones whose objectives cannot be attained any more.
        too_tight: those of them whose TPOT is less than any promised now.
    """

    load: Load
    best_effort: RequestTable
    waiting: RequestTable
    lost: tuple[int, ...]
    new: tuple[Prompt, ...] = ()
    beyond: tuple[int, ...] = ()
    too_tight: frozenset[int] = frozenset()

    @cached_property
    def beside(self) -> RequestTable:
        """The best-effort requests, running ones first."""
        return self.best_effort.joined(self.waiting)


def has_objective(requests: RequestTable) -> Bools:
    """Return the mask [R] of requests with an objective, attainable or not."""
    has_latency = ~np.isnan(requests.tpot_ms) | requests.has_deadline
    return requests.has_stages | has_latency


def is_old(requests: RequestTable, view: EngineView, patience_ms: float) -> Bools:
    """Return the mask [R] of requests that came at least `patience_ms` ago."""
    return requests.arrived_s <= view.now_s - patience_ms / 1000.0


def sorted_requests(view: EngineView, pacing: Pacing, patience_ms: float = math.inf) -> Sorted:
    """Sort the requests of a view.

    A request that has waited for `patience_ms` is best effort as long as it waits, or, without a
    real deadline, reads its prompt.
    """
    load, best_effort, lost = _running(view, pacing, patience_ms)
    waiting = view.waiting
    if not len(waiting):
        return Sorted(load=load, best_effort=best_effort, waiting=waiting, lost=lost)
    needs = _Needs(waiting, view.now_s, pacing)
    is_able = needs.has_targets & needs.begins_in_time
    # It may have missed its pace before it was preempted.
    is_able &= ~needs.is_paced | needs.keeps_pace
    too_tight = is_able & (needs.tpot_ms < pacing.promised_ms)  # even alone
    is_late = is_able & ~too_tight & is_old(waiting, view, patience_ms)
    # Rejected without a deadline that could still come: never attainable so far.
    beyond = too_tight | (is_late & waiting.rejects & ~waiting.has_deadline)
    beyond |= ~is_able & ~waiting.declined & needs.asks
    is_new = is_able & ~too_tight & ~is_late
    stays = ~is_new & ~(beyond & waiting.rejects)
    return Sorted(
        load=load,
        new=tuple(needs.prompts(is_new)),
        best_effort=best_effort,
        waiting=_by_key(waiting.take(stays)),
        beyond=tuple(waiting.id[beyond].tolist()),
        too_tight=frozenset(waiting.id[too_tight].tolist()),
        lost=lost,
    )


def _running(
    view: EngineView, pacing: Pacing, patience_ms: float
) -> tuple[Load, RequestTable, tuple[int, ...]]:
    """Return the load of running requests, the best-effort ones, and the ids of lost promises."""
    running = view.running
    needs = _Needs(running, view.now_s, pacing)
    is_reading = (running.unread > 0) | running.awaits_first
    decodes = needs.has_targets & ~is_reading & needs.keeps_pace
    able = needs.has_targets & is_reading & needs.begins_in_time
    reads = able & (running.has_deadline | ~is_old(running, view, patience_ms))
    # Without a TPOT, the first token was all that a request asked for.
    has_pace = needs.has_targets & np.isfinite(needs.tpot_ms)
    lost = ~decodes & ~able & running.promised & has_pace
    load = Load(
        ids=tuple(running.id[decodes].tolist()),
        due_ms=needs.due_ms[decodes],
        tpot_ms=needs.pace_ms[decodes],
        left=needs.left[decodes],
        prompts=by_deadline(needs.prompts(reads)),
    )
    rest = _by_key(running.take(~decodes & ~reads))
    return load, rest, tuple(running.id[lost].tolist())


def _by_key(requests: RequestTable) -> RequestTable:
    keys = requests.priority_key
    return (
        requests
        if (keys[:-1] <= keys[1:]).all()
        else requests.take(np.argsort(keys, kind="stable"))
    )


class _Needs:
    """The needs of requests, a column [R] each.

    Attributes:
        asks: whether it has an objective for what is still to come.
        has_targets: whether it has one that could be attained on some machine, and was not
            declined. The other columns hold where it has.
        tpot_ms: TPOT of the output, infinite without such an objective.
        deadline_ms: time left until the first token is due.
        begins_in_time: the prompt can be read until then.
        is_soft, can_wait: see `Prompt`.
        due_ms: time left until the next token is due; `pace_ms`: TPOT from now on; `left`: tokens
            that these are judged by.
        is_paced: it decoded before, and has a TPOT.
        keeps_pace: it has one, and can keep it.
    """

    def __init__(self, requests: RequestTable, now_s: float, pacing: Pacing) -> None:
        self._requests, self._times = requests, pacing.times
        self._waited_ms = 1000.0 * (now_s - requests.arrived_s)
        most = requests.max_new_tokens.astype(np.float64)
        self._is_length_known = ~np.isnan(requests.output_tokens)
        self._output_tokens = np.where(self._is_length_known, requests.output_tokens, most)
        self._has_begun = requests.decode_ms != 0.0
        self._prompt_ms = np.array([self._times.ms(n + 1) for n in requests.unread.tolist()])
        has_tpot = requests.has_stages | ~np.isnan(requests.tpot_ms)
        has_latency = ~np.isnan(requests.e2e_ms) & self._is_length_known
        self.asks = np.where(self._has_begun, has_tpot | has_latency, has_objective(requests))
        with np.errstate(over="ignore", invalid="ignore"):  # objectives may be huge
            ttft_ms = self._find_targets()
            self._find_deadlines(ttft_ms)
            self._find_paces(pacing.fastest_ms)

    def _find_targets(self) -> Floats:
        """Find the targets that any machine could attain. Return the TTFT from the arrival."""
        requests = self._requests
        ttft_ms, tpot_ms = _or_inf(requests.ttft_ms), _or_inf(requests.tightest_ms)
        self.has_targets = self.asks & ~requests.declined
        has_latency = ~np.isnan(requests.e2e_ms)
        if has_latency.any():
            # An end-to-end latency leaves shares for TTFT and TPOT.
            first_ms, share_ms, is_possible = self._shares(requests.e2e_ms)
            ttft_ms = np.where(has_latency, np.minimum(ttft_ms, first_ms), ttft_ms)
            tpot_ms = np.where(has_latency, np.minimum(tpot_ms, share_ms), tpot_ms)
            self.has_targets &= ~has_latency | is_possible
        self.has_targets &= ~(tpot_ms < EPS_MS)
        # With larger values, sums and products would not be finite; a TPOT of decades is none.
        self.tpot_ms = np.where(tpot_ms < _DECADES_MS, tpot_ms, np.inf)
        has_deadline = np.isfinite(ttft_ms) & ~self._has_begun
        return np.where(has_deadline, np.minimum(ttft_ms, _DECADES_MS), np.inf)

    def _shares(self, e2e_ms: Floats) -> tuple[Floats, Floats, Bools]:
        """Return TTFT and TPOT that an end-to-end latency leaves, and whether it leaves enough."""
        requests, outputs = self._requests, self._output_tokens
        # A TPOT counts from where `decoded` does: the start of the stage.
        left = np.maximum(1.0, outputs - (requests.max_new_tokens - requests.remaining))
        left_ms = np.maximum(0.0, e2e_ms - self._waited_ms)
        decoding_ms = (left_ms + requests.decode_ms) / (requests.decoded + left)
        token_ms = self._times.ms(1)
        whole_ms = self._prompt_ms + np.maximum(1.0, outputs - 1.0) * token_ms
        factor = (e2e_ms - self._waited_ms) / whole_ms
        first_ms = self._waited_ms + factor * self._prompt_ms
        begun, known = self._has_begun, self._is_length_known
        ttft_ms = np.where(known, np.where(begun, np.inf, first_ms), e2e_ms)
        tpot_ms = np.where(known, np.where(begun, decoding_ms, factor * token_ms), np.inf)
        return ttft_ms, tpot_ms, ~known | begun | (factor >= 1.0)

    def _find_deadlines(self, ttft_ms: Floats) -> None:
        self.is_soft = np.isinf(ttft_ms)
        self.deadline_ms = ttft_ms - self._waited_ms
        self.begins_in_time = self.is_soft | ~(self.deadline_ms < self._prompt_ms - EPS_MS)
        # An implied TTFT counts until the first token has come.
        implied_ms = np.where(self._has_begun, np.nan, self._requests.implied_ttft_ms)
        implied_ms = np.where(implied_ms > 0.0, implied_ms, np.nan)
        patience_ms = np.where(np.isnan(implied_ms), PATIENCE_MS, implied_ms)
        soft_ms = np.maximum(patience_ms - self._waited_ms, 2.0 * self._prompt_ms)
        self.deadline_ms = np.where(self.is_soft, soft_ms, self.deadline_ms)
        self.can_wait = self.is_soft & (self._waited_ms < _PATIENT * _or_inf(implied_ms))

    def _find_paces(self, fastest_ms: float) -> None:
        """Find the pace that a decoding request needs.

        Where TPOT is judged by runs of ten tokens, a run that fell behind should be on time at its
        end. Else it is the mean over the output, and time gained or lost so far is spread over the
        rest.
        """
        requests, tightest_ms = self._requests, self.tpot_ms
        has_pace = self.has_targets & np.isfinite(tightest_ms)
        tpot_ms = np.where(
            requests.has_stages, np.minimum(requests.tpot_ms, _DECADES_MS), tightest_ms
        )
        tpot_ms = np.where(has_pace, tpot_ms, 0.0)  # so that no product is infinite
        left = self.left = self._left()
        decoded, decode_ms = requests.decoded, requests.decode_ms
        pace_ms = tpot_ms + (decoded * tpot_ms - decode_ms) / left
        pace_ms = np.where(requests.has_stages, np.minimum(pace_ms, tightest_ms), pace_ms)
        due_ms = pace_ms
        by_runs = ~np.isnan(requests.run_ms)
        if by_runs.any():
            run_due_ms = (decoded % RUN_TOKENS + 1) * tpot_ms - requests.run_ms
            is_behind = run_due_ms < fastest_ms
            run_due_ms = np.where(is_behind, (run_due_ms + (left - 1) * tpot_ms) / left, run_due_ms)
            run_pace_ms = np.where(is_behind, np.minimum(run_due_ms, tightest_ms), tightest_ms)
            due_ms = np.where(by_runs, run_due_ms, due_ms)
            pace_ms = np.where(by_runs, run_pace_ms, pace_ms)
        self.due_ms, self.pace_ms = due_ms, pace_ms
        self.is_paced = self._has_begun & has_pace
        self.keeps_pace = has_pace & ~(due_ms < fastest_ms)

    def _left(self) -> Floats:
        """Return how many tokens are left of those that its TPOT is judged by, at least one."""
        requests, outputs = self._requests, self._output_tokens
        done = requests.max_new_tokens - requests.remaining
        left = np.where(requests.has_stages, outputs - done, outputs - requests.decoded - 1.0)
        until = requests.until_tokens
        left = np.where(requests.has_stages & ~np.isnan(until), until - requests.decoded, left)
        in_run = (RUN_TOKENS - requests.decoded % RUN_TOKENS).astype(np.float64)
        left = np.where(np.isnan(requests.run_ms), left, in_run)
        return np.maximum(1.0, np.minimum(left, requests.remaining.astype(np.float64)))

    def prompts(self, which: Bools) -> list[Prompt]:
        """Return the prompts of the requests of a mask, which have targets."""
        requests = self._requests
        return [
            Prompt(
                id=int(requests.id[place]),
                deadline_ms=float(self.deadline_ms[place]),
                tokens=int(requests.unread[place]) + 1,
                tpot_ms=float(self.tpot_ms[place]),
                kv_tokens=int(requests.kv_tokens[place]),
                is_running=int(requests.row[place]) >= 0,
                left=max(1.0, float(self._output_tokens[place]) - 1.0),
                is_soft=bool(self.is_soft[place]),
                can_wait=bool(self.can_wait[place]),
            )
            for place in np.flatnonzero(which).tolist()
        ]


def _or_inf(values: Floats) -> Floats:
    return np.where(np.isnan(values), np.inf, values)
