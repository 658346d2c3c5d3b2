"""ReplicaServer: a router with an engine, as other processes see it.

Contract: it accepts or declines an attempt by its state of that moment. It does not know how
messages travel, nor other replicas.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from dataclasses import fields, replace
from itertools import count, cycle
from typing import Any, Protocol, TypeVar

from specrouter.cluster.admission import attainability
from specrouter.cluster.kv_transfer import KVTransfer, KVTransport
from specrouter.cluster.link import Attempt, Feed, Reply
from specrouter.cluster.reports import ReplicaReport
from specrouter.cluster.state import ReplicaState
from specrouter.engine.instruments import EngineInstruments
from specrouter.engine.serving import ServingRouter, streamed
from specrouter.logs import REQUEST_ID
from specrouter.profile.profiler import EngineStatistics
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.request.errors import UnavailableError
from specrouter.request.params import RequestError

logger = logging.getLogger(__name__)

Figures = TypeVar("Figures", EngineStatistics, PerformanceSnapshot)

_REPORT_EVERY = 4  # states per report: reports only serve people and dashboards


class ReplicaEngine(ServingRouter, Protocol):
    """A router with an engine in this process."""

    @property
    def instruments(self) -> EngineInstruments: ...


class ReplicaServer:
    """A replica's server; `transport` connects it to the other halves of pairs."""

    def __init__(self, router: ReplicaEngine, metrics_s: float, transport: KVTransport) -> None:
        self._router = router
        self._kv = KVTransfer(transport)
        self._metrics_s = metrics_s
        sizes = batches(router.instruments.engine_state().rows)
        self._tpot_ms = {size: router.instruments.predicted_tpot_ms(size) for size in sizes}
        self._turns = cycle(sizes)
        self._learn()

    def state(self) -> ReplicaState:
        router, engine = self._router, self._router.instruments.engine_state()
        return ReplicaState(
            running=engine.running,
            waiting=engine.waiting,
            rows=engine.rows,
            kv_reserved_tokens=engine.kv_reserved_tokens,
            kv_capacity_tokens=engine.kv_capacity_tokens,
            unread_tokens=engine.unread_tokens,
            tpot_ms=tuple(self._tpot_ms.items()),
            prefill_ms=self._prefill_ms,
            tightest_tpot_ms=engine.tightest_tpot_ms,
            baseline_tpot_ms=self._baseline_ms,
            max_request_tokens=router.limits.max_tokens,
            retry_after_s=router.instruments.seconds_until_admitted(),
            fingerprint=router.fingerprint,
            status="ready" if router.is_healthy else "failed",
            failure=router.failure,
            step_s=router.instruments.engine.step_s,
        )

    def report(self) -> ReplicaReport:
        router, accounts = self._router, self._router.instruments.slo_accounts
        return ReplicaReport(
            engine=router.instruments.engine_state(),
            statistics=_plain(router.instruments.statistics()),
            decoded=router.instruments.decoded(),
            performance=_plain(router.instruments.performance()),
            decisions=tuple(router.instruments.decisions()),
            admissions=tuple(router.instruments.admissions()),
            prefixes=tuple(router.instruments.prefixes()),
            admission_counts=accounts.admissions(),
        )

    async def feed(self) -> AsyncGenerator[Feed]:
        """Yield news periodically until the engine has failed for good."""
        for number in count():
            self._learn()
            state = self.state()
            yield Feed(state, None if number % _REPORT_EVERY else self.report())
            if state.status == "failed":
                return
            await asyncio.sleep(self._metrics_s)

    def _learn(self) -> None:
        """Update the predictions, for one batch size per call.

        All sizes together would take milliseconds in which the engine makes no token. States in
        replies contain the latest values.
        """
        size = next(self._turns)
        self._tpot_ms[size] = self._router.instruments.predicted_tpot_ms(size)
        self._prefill_ms = self._router.instruments.predicted_prefill_ms()
        self._baseline_ms = self._router.instruments.baseline_tpot_ms()

    async def stream(self, attempt: Attempt) -> AsyncGenerator[Reply]:
        """Serve or decline an attempt; an invalid request gives a reply, not an exception."""
        REQUEST_ID.set(attempt.request_id)
        state = self.state()
        why = self._declines(attempt, state)
        if why is not None:
            yield Reply(state, why)
            return
        routed = attempt.routed
        unread = state.unread_tokens + routed.prompt_tokens
        yield Reply(replace(state, waiting=state.waiting + 1, unread_tokens=unread))
        try:
            asked = replace(attempt.args, kv=await self._kv.received(attempt.kv))
            async with streamed(self._router, [asked]) as stream:
                async for deltas in stream.together():  # a message costs more than its contents
                    async for part, tickets in self._kv.sent(deltas):
                        is_last = bool(part) and part[-1].finish_reason is not None
                        yield Reply(self.state() if is_last else None, deltas=part, kv=tickets)
        except (RequestError, UnavailableError) as error:
            yield Reply(self.state(), str(error))

    def _declines(self, attempt: Attempt, state: ReplicaState) -> str | None:
        if state.status != "ready":
            return f"the replica is {state.status}"
        if not attempt.may_decline or attempt.routed.objective is None:
            return None
        found = attainability(state, attempt.routed, correction=attempt.correction)
        return None if found.attained else found.why


def _plain(figures: Figures) -> Figures:
    """Return a copy that can be sent: of its init fields, with plain mappings."""
    given = {field.name: getattr(figures, field.name) for field in fields(figures) if field.init}
    plain: Any = {name: dict(each) for name, each in given.items() if isinstance(each, Mapping)}
    return replace(figures, **plain)


def batches(rows: int) -> tuple[int, ...]:
    """Return the batch sizes for which TPOTs are reported: powers of two, and all rows."""
    sizes = {1 << power for power in range(rows.bit_length()) if 1 << power < rows}
    return (*sorted(sizes), rows)
