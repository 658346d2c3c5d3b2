"""A replica declines by its state of the moment, tells it with its answers, and coalesces news."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from specrouter import RequestError, SamplingParams
from specrouter.cluster.link import Attempt, Reply
from specrouter.cluster.replica import ReplicaEngine, ReplicaServer
from specrouter.cluster.state import RoutedRequest
from specrouter.engine.engine_state import EngineState
from specrouter.engine.request import Request
from specrouter.request.delta_stream import DeltaStream, DeltaStreams
from specrouter.request.lanes import Lanes
from specrouter.request.objective import Objective
from specrouter.request.output import Delta
from tests.specrouter.cluster.links import LocalTransport
from tests.specrouter.cluster.test_resume import last


@dataclass(kw_only=True)
class Engine:
    """Gives the same deltas to everybody; `refuses` them with an error."""

    deltas: Sequence[Delta] = ()
    refuses: Exception | None = None
    is_healthy: bool = True
    failure: str | None = None
    fingerprint: str = "fp"
    closed_early: int = 0
    lanes: Lanes = field(default_factory=Lanes)
    streams: DeltaStreams = field(default_factory=DeltaStreams)

    @property
    def limits(self) -> SimpleNamespace:
        return SimpleNamespace(max_tokens=64)

    @property
    def instruments(self) -> Engine:
        return self

    @property
    def engine(self) -> SimpleNamespace:
        return SimpleNamespace(step_s=0.0)

    def engine_state(self) -> EngineState:
        return EngineState(
            running=1,
            waiting=0,
            rows=4,
            kv_reserved_tokens=10,
            kv_capacity_tokens=100,
            kv_bytes={},
            quarantines={},
            quarantined=frozenset(),
            unread_tokens=5,
        )

    def predicted_tpot_ms(self, requests: int) -> float:
        return 10.0 * requests

    def predicted_prefill_ms(self) -> float:
        return 0.5

    def baseline_tpot_ms(self) -> float:
        return 20.0

    def seconds_until_admitted(self) -> float:
        return 0.0

    def check_room(self, max_waiting: int | None = None) -> None:
        if self.refuses is not None:
            raise self.refuses

    def submit_each(
        self, asked: Sequence[Request], stream: DeltaStream, max_waiting: int | None = None
    ) -> None:
        stream.begin([self])
        for delta in self.deltas:
            stream.put(0, delta)

    def cancel(self) -> None:
        self.closed_early += not self.deltas


def server(engine: Engine) -> ReplicaServer:
    return ReplicaServer(cast(ReplicaEngine, engine), 0.5, LocalTransport())


def attempt(objective: Objective | None = None, may_decline: bool = True) -> Attempt:
    args = Request(prompt=(1, 2), params=SamplingParams(), speculation=None, slo=None)
    return Attempt(
        args=args,
        routed=RoutedRequest(number=0, prompt_tokens=10, remaining=5, objective=objective),
        number=1,
        request_id=None,
        may_decline=may_decline,
    )


def replies(engine: Engine, *given: Any) -> list[Reply]:
    async def collect() -> list[Reply]:
        return [reply async for reply in server(engine).stream(attempt(*given))]

    return asyncio.run(collect())


def test_speeds_are_told_for_powers_of_two_and_all_rows() -> None:
    state = server(Engine()).state()
    assert state.tpot_ms == ((1, 10.0), (2, 20.0), (4, 40.0))
    assert (state.running, state.rows, state.unread_tokens) == (1, 4, 5)


def test_the_first_answer_counts_the_request_and_the_last_has_a_state() -> None:
    first, *middle, final = replies(
        Engine(deltas=[Delta(text="a", token_ids=[1]), Delta(text="b", token_ids=[2]), last(3)])
    )
    assert first.state is not None
    assert (first.state.waiting, first.state.unread_tokens, first.declined) == (1, 15, None)
    assert final.state is not None
    told = [delta for reply in (*middle, final) for delta in reply.deltas]
    assert [delta.token_ids for delta in told] == [[1], [2], [3]]
    assert len(middle) < 2, "what has come goes in one message"


def test_an_objective_that_cannot_be_attained_is_declined_with_the_reason() -> None:
    engine = Engine(deltas=[last(3)])
    [reply] = replies(engine, Objective(tpot_ms=15.0, ttft_ms=None))
    assert reply.declined == "a TPOT of 20 ms where 15 ms are asked"
    assert reply.state is not None
    assert replies(engine, Objective(tpot_ms=15.0, ttft_ms=None), False)[0].declined is None, (
        "it must not"
    )
    assert replies(engine, Objective(tpot_ms=25.0, ttft_ms=None))[0].declined is None


def test_one_that_has_failed_declines_everything() -> None:
    engine = Engine(deltas=[last(3)], is_healthy=False, failure="broken")
    [reply] = replies(engine, None, False)
    assert reply.declined == "the replica is failed"
    assert reply.state is not None
    assert (reply.state.status, reply.state.failure) == ("failed", "broken")


def test_what_is_wrong_with_a_request_is_no_exception() -> None:
    final = replies(Engine(refuses=RequestError("prompt", "is empty")))[-1]
    assert final.declined == "prompt: is empty"


def test_leaving_a_stream_ends_its_request() -> None:
    engine = Engine()

    async def leave() -> None:
        async with aclosing(server(engine).stream(attempt())) as stream:
            await anext(stream)
            waiting = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(leave())
    assert engine.closed_early == 1


def test_predictions_are_made_for_the_feed_and_not_for_each_request() -> None:
    """They take milliseconds, in which no token is made."""

    own = server(Engine(deltas=[last(3)]))

    async def asked() -> list[Reply]:
        return [reply async for reply in own.stream(attempt())]

    with pytest.MonkeyPatch.context() as patch:
        for name in ("predicted_tpot_ms", "predicted_prefill_ms", "baseline_tpot_ms"):
            patch.delattr(Engine, name)
        first, *_ = asyncio.run(asked())
    assert first.state is not None
    assert (first.state.prefill_ms, first.state.baseline_tpot_ms) == (0.5, 20.0)
