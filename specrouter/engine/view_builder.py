"""The builder of `EngineView`s from the engine's requests, rows and measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from specrouter.engine.request_book import RequestBook
from specrouter.profile.profiler import PerformanceProfiler
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.request.objective import Objective
from specrouter.request.running import RunningRequest
from specrouter.request.spec import RequestSpec
from specrouter.view import EngineView, RequestView, Standing
from statemgr import TokenChain

SNAPSHOT_CYCLES = 3  # cycles that a snapshot is used for, because taking one costs time
# Waiting requests whose prefixes are looked up again in a cycle; with hundreds of cached prefixes,
# each look-up takes milliseconds.
LOOKED_UP = 8
_NOTHING = Objective(tpot_ms=None, ttft_ms=None)


@dataclass
class _Waiting:
    """A waiting request, with cached tokens of its text by model, as found in cycle `looked_at`."""

    spec: RequestSpec
    text: TokenChain
    cached: Mapping[str, int] = field(default_factory=dict)
    looked_at: int = -1


class ViewBuilder:
    """Builder of views of one engine.

    Args:
        models: models that can verify, weakest first, the target last.
        draft_only: the others.
    """

    def __init__(
        self,
        models: Sequence[str],
        draft_only: Sequence[str],
        book: RequestBook,
        profiler: PerformanceProfiler,
    ) -> None:
        self._models = (*draft_only, *models)
        *self._drafters, self._target = models
        self._book = book
        self._executor = book.executor
        self._profiler = profiler
        self._snapshot: PerformanceSnapshot | None = None
        self._snapshot_cycle = 0
        self._output_tokens: Mapping[str | None, float] = {}
        self._known: dict[int, _Waiting] = {}  # by id

    def build(
        self,
        cycle: int,
        waiting: Sequence[RunningRequest],
        available: frozenset[str],
        standing: Standing,
    ) -> EngineView:
        """Return the view of running requests, in admission order, and of those in `waiting`."""
        book, executor, now_s = self._book, self._executor, self._book.clock()
        return EngineView(
            cycle=cycle,
            now_s=now_s,
            running=self._running(book.running, now_s),
            waiting=self._waiting(waiting, now_s, cycle),
            free_rows=executor.rows - len(book.running),
            kv_free_tokens=executor.free_tokens,
            available=available,
            loaded=frozenset(name for name in self._models if executor.is_open(name)),
            performance=self._performance(cycle, standing),
            standing=standing,
            output_tokens=self._output_tokens,
            pace_margin=book.promises.pace_margin,
            prediction_error=book.promises.error,
        )

    def admitted(self, came: Mapping[int, RunningRequest]) -> tuple[RequestView, ...]:
        """Return the views of requests that were just given a row, in that order."""
        return self._running(came, self._book.clock())

    def _performance(self, cycle: int, standing: Standing) -> PerformanceSnapshot:
        """Return the snapshot, a new one every few cycles and after a shadow evaluation."""
        known, age = self._snapshot, cycle - self._snapshot_cycle
        if known is None or age >= SNAPSHOT_CYCLES or standing.evaluated_at == cycle - 1:
            known = self._snapshot = self._profiler.snapshot()
            self._output_tokens = self._book.lengths.quantiles()
            self._snapshot_cycle = cycle
        return known

    def _running(
        self, running: Mapping[int, RunningRequest], now_s: float
    ) -> tuple[RequestView, ...]:
        if not running:
            return ()
        rows = np.fromiter(running, dtype=np.int64)
        states = self._executor.states
        left = states.lag(self._target, rows).tolist()
        slots = states.slots_of(rows).tolist()
        repeatable = self._executor.repeatable(rows).tolist()
        lags = zip(*(states.lag(name, rows).tolist() for name in self._drafters), strict=True)
        missed = [dict(zip(self._drafters, each, strict=True)) for each in lags]
        missed = missed or [{}] * len(rows)
        return tuple(
            self._view(request, now_s, left[at], missed[at], slots[at], repeatable[at])
            for at, request in enumerate(running.values())
        )

    def _waiting(
        self, requests: Sequence[RunningRequest], now_s: float, cycle: int
    ) -> tuple[RequestView, ...]:
        """Return views of requests as if they began now, with cached tokens taken as read.

        Tokens that running rows have read of a shared prompt do not count as cached.
        """
        self._look_up(requests, cycle)
        views = []
        for request in requests:
            unread = int(request.committed_tokens) - 1  # fails for NaN, which is never admitted
            known = self._known.get(request.handle.request_id)
            cached = known.cached if known else {}
            missed = {name: unread - cached.get(name, 0) for name in self._drafters}
            handed = self._executor.hand_over.expected(request.spec)
            left = unread - max(handed, cached.get(self._target, 0))
            slots = self._executor.states.slots_for(unread + 1)
            views.append(self._view(request, now_s, left, missed, slots, 0))
        return tuple(views)

    def _look_up(self, requests: Sequence[RunningRequest], cycle: int) -> None:
        """Look up the cached prefixes of new requests, and of those with the oldest look-ups."""
        prefixes, before = self._executor.prefixes, self._known
        self._known = {}
        if not prefixes.are_kept:
            return
        for request in requests:
            known = before.get(request.handle.request_id)
            if known is None or len(known.text.tokens) != request.committed_tokens:
                known = _Waiting(request.spec, TokenChain(request.continuation.committed))
            self._known[request.handle.request_id] = known
        stalest = sorted(self._known.values(), key=attrgetter("looked_at"))
        new = sum(one.looked_at < 0 for one in stalest)
        for known in stalest[: new + LOOKED_UP]:
            known.cached = prefixes.cached(known.spec, known.text)
            known.looked_at = cycle

    def _view(
        self,
        request: RunningRequest,
        now_s: float,
        prompt_left: int,
        missed: Mapping[str, int],
        slots: int,
        repeatable: int,
    ) -> RequestView:
        spec, pace, objective = request.spec, request.pace, request.objective or _NOTHING
        if request.row is None:
            kv_tokens = self._executor.needed_tokens(request.committed_tokens, spec.total_tokens)
        else:
            kv_tokens = self._executor.held_tokens(request.row)
        return RequestView(
            id=request.handle.request_id,
            priority_key=request.admission_key,
            arrived_s=request.submitted_s,
            kv_tokens=kv_tokens,
            prompt_left=max(prompt_left, 0),
            remaining=request.remaining,
            max_new_tokens=spec.most_tokens,
            row=request.row,
            decoded=pace.decoded,
            decode_ms=pace.decode_ms(now_s),
            tpot_ms=pace.tpot_ms(objective),
            ttft_ms=objective.ttft_ms,
            implied_ttft_ms=objective.implied_ttft_ms,
            tier=objective.slo_class,
            sampled=spec.params.temperature > 0,
            override=spec.speculation,
            missed=missed,
            repeatable=repeatable,
            slots=slots,
            e2e_ms=objective.e2e_ms,
            stages=pace.stages,
            run_ms=request.run_ms(now_s),
            output_tokens=request.output_tokens,
            declined=request.is_declined,
            rejects=request.rejects,
            promised=request.is_promised,
            awaits_first=request.row is not None and not request.has_begun,
            drafts=pace.drafts,
            acceptance=pace.acceptance,
        )
