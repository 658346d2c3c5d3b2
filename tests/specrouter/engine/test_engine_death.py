"""What the engine cannot mend ends it: everybody is told, and another router can be made."""

import asyncio
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest

from modelpool.packed_model import PackedModel
from specrouter import (
    SLO,
    ChainRouter,
    EngineDeadError,
    RequestHandle,
    RequestOutput,
    SamplingParams,
    Speculation,
)
from specrouter.cycle import CyclePlan, CycleResult
from specrouter.execution.executor import Executor
from specrouter.execution.time_profile import profile_model
from tests.specrouter.faults import PATIENCE_S, Faults, wait_until

PROMPT = [5, 6, 7]
SHORT = SamplingParams(max_new_tokens=8, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=60, ignore_eos=True)
PAIR = Speculation(("small", "target"), depth=3)
CABLE = "Odd: the cable is loose"


class Odd(Exception):
    pass


class Cycles:
    """Those that begin after `breaks` fail; those that begin after `sticks` wait for `goes_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.breaks, self.sticks, self.is_stuck, self.goes_on = (
            threading.Event() for _ in range(4)
        )
        real = Executor.run

        def run(executor: Executor, plan: CyclePlan) -> CycleResult:
            if self.breaks.is_set():
                raise Odd("the cable is loose")
            if self.sticks.is_set():
                self.is_stuck.set()
                self.goes_on.wait(PATIENCE_S)
            return real(executor, plan)

        monkeypatch.setattr(Executor, "run", run)


@pytest.fixture
def cycles(monkeypatch: pytest.MonkeyPatch) -> Cycles:
    return Cycles(monkeypatch)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


@pytest.fixture
def made(small_config: dict[str, Any]) -> Callable[..., ChainRouter]:
    def make(**engine: Any) -> ChainRouter:
        settings = {**small_config.get("engine", {}), "max_requests": 1, **engine}
        return ChainRouter.from_config({**small_config, "engine": settings})

    return make


def begun(router: ChainRouter, **more: Any) -> RequestHandle:
    """A long request that has its first token."""
    handle = router.submit(PROMPT, LONG, "off", **more)
    next(iter(handle))
    return handle


def dead(handle: RequestHandle, cause: str) -> RequestOutput:
    """What a request had until its engine died."""
    with pytest.raises(EngineDeadError, match=cause) as caught:
        handle.result(PATIENCE_S)
    assert caught.value.output is not None
    return caught.value.output


def ended(router: ChainRouter) -> dict[str, float]:
    return {
        sample.labels["finish_reason"]: sample.value
        for family in router.instruments.ended_requests()
        for sample in family.samples
        if sample.name == "specrouter_requests_total"
    }


def test_a_cycle_that_fails_ends_all_that_run_and_wait_and_they_are_counted(
    made: Callable[..., ChainRouter], faults: Faults, cycles: Cycles
) -> None:
    with made() as router:
        expected = router.generate([PROMPT], LONG, "off")[0].token_ids
        with faults.holding():
            running = begun(router, slo=SLO(tpot_ms=1e6))
            waiting = router.submit(PROMPT, SHORT)
            cycles.breaks.set()
        output = dead(running, CABLE)
        assert output.token_ids == expected[: len(output.token_ids)] != []
        assert output.metrics.attained is False
        assert dead(waiting, CABLE).token_ids == []
        with pytest.raises(EngineDeadError, match=CABLE):
            list(waiting)
        assert ended(router)["engine_dead"] == 2
        assert router.instruments.slo_accounts.report().total.requests == 3
        wait_until(lambda: not router.is_healthy)
        assert router.failure == CABLE
        for late in (
            lambda: router.submit(PROMPT, SHORT),
            lambda: router.set_policy("target-only"),
            lambda: router.instruments.run_idle(lambda: None),
        ):
            with pytest.raises(EngineDeadError, match=CABLE):
                late()
    cycles.breaks.clear()
    with made() as router:
        assert router.generate([PROMPT], LONG)[0].token_ids == expected


def test_whole_texts_and_streams_raise_it(made: Callable[..., ChainRouter], cycles: Cycles) -> None:
    def stream(router: ChainRouter) -> None:
        for _ in router.stream(PROMPT, LONG):
            cycles.breaks.set()

    async def astream(router: ChainRouter) -> None:
        async for _ in router.astream(PROMPT, LONG):
            cycles.breaks.set()

    def generate(router: ChainRouter) -> None:
        cycles.breaks.set()
        router.generate([PROMPT], LONG)

    for ask in (stream, lambda router: asyncio.run(astream(router)), generate):
        cycles.breaks.clear()
        with made() as router, pytest.raises(EngineDeadError, match=CABLE):
            ask(router)


def test_a_cycle_that_does_not_end_ends_every_request_and_close_does_not_wait_for_it(
    made: Callable[..., ChainRouter], faults: Faults, cycles: Cycles
) -> None:
    router = made()
    handles = caught(router, faults, cycles)
    assert router.is_healthy
    router.instruments.engine._began_s = -math.inf
    for handle in handles:
        dead(handle, "a cycle has taken more than 600 s")
    wait_until(lambda: not router.is_healthy)
    router.close()
    ends_unheard(router, cycles)


def test_a_router_closes_though_its_target_hangs_and_tells_who_waits(
    made: Callable[..., ChainRouter], faults: Faults, cycles: Cycles
) -> None:
    router = made()
    handles = caught(router, faults, cycles)
    router.close(patience_s=0.2)
    for handle in handles:
        dead(handle, "did not stop")
    ends_unheard(router, cycles)


def caught(router: ChainRouter, faults: Faults, cycles: Cycles) -> list[RequestHandle]:
    """A request that has a token when its next cycle never ends, and one that waits."""
    with faults.holding():
        handles = [begun(router), router.submit(PROMPT, LONG, "off")]
        cycles.sticks.set()
    assert cycles.is_stuck.wait(PATIENCE_S)
    return handles


def ends_unheard(router: ChainRouter, cycles: Cycles) -> None:
    thread = router._thread._thread
    assert thread.is_alive(), "it has ended by itself"
    cycles.goes_on.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_drafter_that_does_not_return_ends_the_engine_and_calls_that_wait_for_it(
    made: Callable[..., ChainRouter], faults: Faults
) -> None:
    with made() as router:
        router.generate([PROMPT], SHORT, PAIR)
        faults.hanging = {"small"}
        handle = router.submit(PROMPT, LONG, PAIR)
        dead(handle, "a forward of small has taken more than 120 s")
        assert faults.hangs.is_set()
        with pytest.raises(EngineDeadError):
            router.instruments.check_integrity()
        faults.released.set()


def test_a_drafter_that_hangs_while_it_is_timed_ends_the_engine(
    made: Callable[..., ChainRouter],
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    def profile(model: PackedModel) -> Any:
        faults.hanging = {"small"}
        return profile_model(model)

    monkeypatch.setenv("SPECROUTER_CACHE", str(tmp_path))  # where no times were kept
    with made(preload=False) as router:
        monkeypatch.setattr("specrouter.execution.model_times.profile_model", profile)
        dead(router.submit(PROMPT, SHORT, PAIR), "a forward of small")
        faults.released.set()


def test_a_target_that_takes_long_is_no_fault(
    made: Callable[..., ChainRouter], faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a long prompt's chunk does on a slow CPU: only the whole cycle's time counts."""
    with made(hang_timeout_s=0.02) as router:
        with faults.holding() as hold:
            handle = begun(router)
            hold.let_pass(0)
            assert not threading.Event().wait(0.1)
        assert len(handle.result(PATIENCE_S).token_ids) == 60
