"""A drafter whose forward hangs: the requests go on without it, and their texts are the same."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from modelpool.forward import ForwardOutput
from research.studies.bare_forward import time_forward
from specrouter import ChainRouter, SamplingParams, Speculation
from specrouter.engine import watchdog
from specrouter.execution.hang_guard import Abandoned, HangGuard
from test_support.families import pool_settings
from test_support.routers import assert_whole
from tests.specrouter.faults import PATIENCE_S, Faults, seem_endless, wait_until

ENGINE = {"max_requests": 4, "max_model_len": 128, "preload": False}


@pytest.fixture(autouse=True)
def frequent_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_LOOK_S", 0.02)


class Hang:
    """The first forward of a model after `arm` waits for `release`, and seems endless."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.hangs = threading.Event()
        self.woke = threading.Event()
        self._armed: str | None = None
        self._inside = HangGuard.inside

    def arm(self, model: str) -> None:
        self._armed = model

    @contextmanager
    def inside(self, guard: HangGuard, model: str) -> Iterator[None]:
        with self._inside(guard, model):
            if model != self._armed or self.hangs.is_set():
                yield
                return
            seem_endless(guard)
            self.hangs.set()
            self.release.wait(PATIENCE_S)
            yield  # writes keys and values, far too late
            self.woke.set()


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Hang:
    hang = Hang()
    monkeypatch.setattr(HangGuard, "inside", lambda guard, model: hang.inside(guard, model))
    return hang


@pytest.fixture
def router(small_family: dict[str, Path]) -> Iterator[ChainRouter]:
    with ChainRouter.from_config({"pool": pool_settings(small_family), "engine": ENGINE}) as router:
        yield router


@pytest.mark.parametrize("hanging", ["small", "middle"])
@pytest.mark.parametrize("width", [1, 3])
def test_a_hanging_model_costs_time_and_no_token(
    router: ChainRouter, hang: Hang, hanging: str, width: int
) -> None:
    params = SamplingParams(max_new_tokens=24, temperature=1.0, seed=3, ignore_eos=True)
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    expected = [out.token_ids for out in router.generate(prompts, params, speculation="off")]
    chain = Speculation(("small", "middle", "target"), depth=4, width=width)
    router.generate(prompts, params, speculation=chain)
    hang.arm(hanging)
    got = router.generate(prompts, params, speculation=chain)
    assert hang.hangs.is_set()
    assert [out.token_ids for out in got] == expected
    hang.release.set()
    assert hang.woke.wait(PATIENCE_S)
    # What the forward that came back late has written harms nobody.
    for _ in range(5):
        again = router.generate(prompts, params, speculation=chain)
        assert [out.token_ids for out in again] == expected
    assert_whole(router)


def test_who_waits_for_a_cycle_that_hangs_is_served_when_it_is_left_behind(
    router: ChainRouter, hang: Hang
) -> None:
    params, chain = SamplingParams(max_new_tokens=60), Speculation(("small", "target"))
    router.generate([5, 6], params, chain)
    hang.arm("small")
    with ThreadPoolExecutor() as others:
        handle = router.submit([5, 6], params, chain)
        assert hang.hangs.wait(PATIENCE_S)
        middle: dict[str, Any] = {"chain": ("middle", "target")}
        asked = [
            others.submit(router.set_policy, "static", depth=depth, **middle) for depth in (1, 2, 3)
        ]
        asked.append(others.submit(router.instruments.check_integrity))
        try:
            for one in asked:
                one.result(PATIENCE_S)
            assert handle.result(PATIENCE_S).finish_reason == "length"
        finally:
            hang.release.set()
    assert hang.woke.wait(PATIENCE_S)
    assert len(router.generate([5, 6], params)[0].token_ids) == 60
    assert_whole(router)


def test_a_call_that_hangs_costs_the_running_requests_nothing(
    router: ChainRouter, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, chain = SamplingParams(max_new_tokens=100, ignore_eos=True), ("small", "target")
    alone = router.generate([5, 6], params, "off")[0].token_ids
    faults = Faults(monkeypatch)
    router.generate([5, 6], params, Speculation(chain))
    small = router.pool.get("small")
    hang.arm("small")
    with ThreadPoolExecutor(1) as other:
        with faults.holding() as hold:
            running = router.submit([5, 6], params, "off")
            next(iter(running))
            hold.let_pass(0)  # the engine is in a cycle when the call comes, not between two
            call = other.submit(
                router.instruments.run_idle,
                lambda: time_forward(small, 1, 1, 8, repeats=1),
            )
            wait_until(lambda: bool(router._thread._calls))
        with pytest.raises(TimeoutError, match="small"):
            call.result(PATIENCE_S)
        hang.release.set()
        assert hang.woke.wait(PATIENCE_S)
    assert running.result(PATIENCE_S).token_ids == alone
    assert router.instruments.restarts == 0
    assert_whole(router)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_who_takes_over_has_the_threads_of_all_and_not_of_the_hanging_model(
    small_family: dict[str, Path], two_threads: None
) -> None:
    pool = pool_settings(small_family)
    pool["models"][0]["threads"] = 1
    params, chain = SamplingParams(max_new_tokens=8), Speculation(("small", "target"))
    hangs, release = threading.Event(), threading.Event()
    with ChainRouter.from_config({"pool": pool, "engine": ENGINE}) as router:
        router.generate([5, 6], params, chain)
        assert router.instruments.run_idle(torch.get_num_threads) == 2
        small = router.pool.get("small")
        forward = small.shortcut or small._forward

        def hanging(*arguments: Any) -> ForwardOutput:
            if not hangs.is_set():
                assert torch.get_num_threads() == 1
                seem_endless(router.instruments.engine.guard)
                hangs.set()
                release.wait(PATIENCE_S)
            return forward(*arguments)

        small.shortcut = hanging
        router.generate([5, 6], params, chain)
        assert hangs.is_set()
        assert router.instruments.run_idle(torch.get_num_threads) == 2
        release.set()


def test_the_router_closes_while_a_drafter_hangs(router: ChainRouter, hang: Hang) -> None:
    chain = Speculation(("small", "target"))
    router.generate([5, 6], SamplingParams(max_new_tokens=8), chain)
    hang.arm("small")
    handle = router.submit([5, 6], SamplingParams(max_new_tokens=100), chain)
    assert hang.hangs.wait(PATIENCE_S)
    router.close()
    assert handle.result(0).finish_reason in ("cancelled", "length", "eos")
    hang.release.set()


def test_a_forward_is_given_up_only_after_its_time_and_only_while_it_lasts() -> None:
    now = [0.0]
    guard = HangGuard(5.0, clock=lambda: now[0])
    assert guard.give_up() is None
    with guard.inside("small"):
        now[0] = 4.9
        assert guard.give_up() is None
    now[0] = 100.0
    assert guard.give_up() is None

    def late() -> None:
        with guard.inside("small"):
            now[0] = 106.0
            assert guard.give_up() == "small"
            assert guard.give_up() is None
            raise RuntimeError("too late")  # which does not come through

    with pytest.raises(Abandoned):
        late()
