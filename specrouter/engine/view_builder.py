"""The builder of `EngineView`s from the engine's requests, rows and measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np

from specrouter.cycle import Bools, Floats, Ints
from specrouter.engine.request_book import RequestBook
from specrouter.profile.profiler import PerformanceProfiler
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.request.objective import Objective
from specrouter.request.running import RunningRequest
from specrouter.request.spec import RequestSpec
from specrouter.view import EngineView, RequestTable, Standing
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
        none = np.zeros(0, dtype=np.int64)
        by = dict.fromkeys(self._drafters, none)
        self._no_requests = self._table(
            (),
            0.0,
            row=none,
            kv_tokens=none,
            unread=none,
            unread_by=by,
            slots=none,
            repeatable=none,
        )

    def build(
        self,
        cycle: int,
        waiting: Sequence[RunningRequest],
        available: frozenset[str],
        standing: Standing,
    ) -> EngineView:
        """Return the view of running requests, in admission order, and of those in `waiting`."""
        book, executor, now_s = self._book, self._executor, self._book.clock()
        performance = self._performance(cycle, standing)
        return EngineView(
            cycle=cycle,
            now_s=now_s,
            running=self._running(book.running, now_s),
            waiting=self._waiting(waiting, now_s, cycle),
            free_rows=executor.rows - len(book.running),
            kv_free_tokens=executor.free_tokens,
            available=available,
            loaded=frozenset(name for name in self._models if executor.is_open(name)),
            performance=performance,
            standing=standing,
            prediction_error=book.promises.error,
        )

    def admitted(self, came: Mapping[int, RunningRequest]) -> RequestTable:
        """Return the requests that were just given a row, in that order."""
        return self._running(came, self._book.clock())

    def _performance(self, cycle: int, standing: Standing) -> PerformanceSnapshot:
        """Return the snapshot, a new one every few cycles and after a shadow evaluation."""
        known, age = self._snapshot, cycle - self._snapshot_cycle
        if known is None or age >= SNAPSHOT_CYCLES or standing.evaluated_at == cycle - 1:
            known = self._snapshot = self._profiler.snapshot()
            self._output_tokens = self._book.lengths.quantiles()
            self._snapshot_cycle = cycle
        return known

    def _running(self, running: Mapping[int, RunningRequest], now_s: float) -> RequestTable:
        rows, states = np.fromiter(running, dtype=np.int64), self._executor.states
        if not len(rows):
            return self._no_requests
        return self._table(
            list(running.values()),
            now_s,
            row=rows,
            kv_tokens=_ints([self._executor.held_tokens(row) for row in running]),
            unread=np.maximum(states.lag(self._target, rows), 0),
            unread_by={name: states.lag(name, rows) for name in self._drafters},
            slots=states.slots_of(rows),
            repeatable=self._executor.repeatable(rows),
        )

    def _waiting(
        self, requests: Sequence[RunningRequest], now_s: float, cycle: int
    ) -> RequestTable:
        """Return requests as if they began now, with cached tokens taken as read.

        Tokens that running rows have read of a shared prompt do not count as cached.
        """
        self._look_up(requests, cycle)
        if not requests:
            return self._no_requests
        executor = self._executor
        # This fails for a number of tokens that is NaN.
        unread = [int(request.committed_tokens) - 1 for request in requests]
        known = [self._known.get(request.handle.request_id) for request in requests]
        cached = [one.cached if one else {} for one in known]
        handed = [executor.hand_over.expected(request.spec) for request in requests]

        def left(model: str) -> Ints:
            return _ints(unread) - _ints([one.get(model, 0) for one in cached])

        return self._table(
            requests,
            now_s,
            row=np.full(len(requests), -1),
            kv_tokens=_ints(
                [
                    executor.needed_tokens(one.committed_tokens, one.spec.total_tokens)
                    for one in requests
                ]
            ),
            unread=np.maximum(np.minimum(left(self._target), _ints(unread) - _ints(handed)), 0),
            unread_by={name: left(name) for name in self._drafters},
            slots=_ints([executor.states.slots_for(tokens + 1) for tokens in unread]),
            repeatable=np.zeros(len(requests), dtype=np.int64),
        )

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

    def _table(
        self, requests: Sequence[RunningRequest], now_s: float, **columns: Any
    ) -> RequestTable:
        """Return a table of requests, with these `columns` as they are."""
        paces = [one.pace for one in requests]
        objectives = [one.objective or _NOTHING for one in requests]
        stages = [pace.stages for pace in paces]
        tpots = [pace.tpot_ms(one) for pace, one in zip(paces, objectives, strict=True)]
        specs = [one.spec for one in requests]
        override = np.empty(len(requests), dtype=np.object_)
        override[:] = [spec.speculation for spec in specs]
        table = RequestTable(
            id=_ints([one.handle.request_id for one in requests]),
            priority_key=_floats([one.admission_key for one in requests]),
            arrived_s=_floats([one.submitted_s for one in requests]),
            remaining=_ints([one.remaining for one in requests]),
            max_new_tokens=_ints([spec.most_tokens for spec in specs]),
            decoded=_ints([pace.decoded for pace in paces]),
            decode_ms=_floats([pace.decode_ms(now_s) for pace in paces]),
            tpot_ms=_floats(tpots),
            tightest_ms=_floats(
                [
                    min(stage.tpot_ms for stage in left) if left else tpot_ms
                    for left, tpot_ms in zip(stages, tpots, strict=True)
                ]
            ),
            until_tokens=_floats([left[0].until_tokens if left else None for left in stages]),
            ttft_ms=_floats([one.ttft_ms for one in objectives]),
            e2e_ms=_floats([one.e2e_ms for one in objectives]),
            implied_ttft_ms=_floats([one.implied_ttft_ms for one in objectives]),
            run_ms=_floats([one.run_ms(now_s) for one in requests]),
            output_tokens=_floats([self._output_length(one) for one in requests]),
            has_stages=_bools([bool(left) for left in stages]),
            sampled=_bools([spec.params.temperature > 0 for spec in specs]),
            declined=_bools([one.is_declined for one in requests]),
            rejects=_bools([one.rejects for one in requests]),
            promised=_bools([one.is_promised for one in requests]),
            awaits_first=_bools([one.row is not None and not one.has_begun for one in requests]),
            drafts=_ints([pace.drafts for pace in paces]),
            acceptance=_floats([pace.acceptance for pace in paces]),
            override=override,
            **columns,
        )
        for column in (*vars(table).values(), *table.unread_by.values()):
            if isinstance(column, np.ndarray):
                column.setflags(write=False)  # a policy must not change what others see
        return table

    def _output_length(self, request: RunningRequest) -> float | None:
        if request.output_tokens is not None:
            return request.output_tokens
        slo_class = (request.objective or _NOTHING).slo_class
        usual = self._output_tokens.get(slo_class)
        return None if usual is None else min(float(request.spec.most_tokens), usual)


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def _floats(values: Sequence[float | None]) -> Floats:
    """Return the values as numbers; None becomes NaN."""
    return np.array(values, dtype=np.float64)


def _bools(values: Sequence[bool]) -> Bools:
    return np.array(values, dtype=np.bool_)
