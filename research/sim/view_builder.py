"""SimulatedViews: the requests and rows of a simulated engine as a frozen `EngineView`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np

from research.sim.machine import Machine
from research.sim.request import SimulatedRequest
from research.sim.rows import SimulatedRows, slots_for
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.slo.serve.pace_margin import PaceMargin
from specrouter.view import EngineView, RequestView, Standing


@dataclass(frozen=True)
class SimulatedViews:
    machine: Machine
    rows: SimulatedRows
    margin: PaceMargin
    _models: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_models", frozenset(self.machine.names))

    def build(
        self,
        cycle: int,
        now_s: float,
        running: Mapping[int, SimulatedRequest],
        waiting: Sequence[SimulatedRequest],
        performance: PerformanceSnapshot,
        standing: Standing,
    ) -> EngineView:
        """`running`: by row, in the order of admission."""
        budget = self.machine.kv_tokens
        return EngineView(
            cycle,
            now_s,
            self._running(running, now_s),
            tuple(self.waiting(one, now_s) for one in waiting),
            self.rows.free,
            None if budget is None else budget - self.rows.reserved_tokens,
            self._models,
            self._models,
            performance,
            standing,
            pace_margin=self.margin.value,
        )

    def _running(
        self, running: Mapping[int, SimulatedRequest], now_s: float
    ) -> tuple[RequestView, ...]:
        if not running:
            return ()
        at, rows, drafters = np.fromiter(running, dtype=np.int64), self.rows, self.machine.drafters
        left = rows.lag(self.machine.target, at).tolist()
        slots = rows.slots(at).tolist()
        lags = [rows.lag(name, at).tolist() for name in drafters]
        missed = [dict(zip(drafters, each, strict=True)) for each in zip(*lags, strict=True)]
        missed = missed or [{}] * len(at)
        return tuple(map(_view, running.values(), repeat(now_s), left, missed, slots))

    def waiting(self, request: SimulatedRequest, now_s: float) -> RequestView:
        if request.waiting_view is not None:
            return request.waiting_view
        unread = request.prompt_tokens + request.tokens - 1
        missed = {
            name: min(unread, 1) if name in self.rows.follow else unread
            for name in self.machine.drafters
        }
        slots = int(slots_for(np.array(unread + 1)))
        view = _view(request, now_s, unread - request.kv_tokens, missed, slots)
        if not request.tokens:  # else time passes for it
            request.waiting_view = view
        return view


def _view(
    request: SimulatedRequest,
    now_s: float,
    prompt_left: int,
    missed: Mapping[str, int],
    slots: int,
) -> RequestView:
    asked = request.request
    return RequestView(
        request.id,
        request.sent_s,
        request.sent_s,
        request.reserve_tokens,
        prompt_left,
        request.remaining,
        asked.new_tokens,
        request.row,
        request.decoded,
        request.decode_ms(now_s),
        request.tpot_ms,
        asked.ttft_ms,
        request.tier,
        asked.temperature > 0,
        asked.speculation,
        missed,
        0,
        slots,
        asked.e2e_ms,
        request.stages,
        output_tokens=asked.new_tokens,
        declined=request.is_declined,
        run_ms=request.run_ms(now_s),
        awaits_first=request.row is not None and not request.tokens,
        drafts=request.drafts,
        acceptance=request.acceptance,
    )
