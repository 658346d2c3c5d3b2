"""What is loaded and timed before the first request, and what goes wrong with it."""

from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from specrouter import ChainRouter, EngineDeadError, RequestError, SamplingParams, Speculation
from specrouter.engine import engine_thread
from specrouter.engine.engine import Engine
from specrouter.execution import model_times
from specrouter.execution.time_profile import factor_now
from test_support.routers import assert_whole
from tests.specrouter.engine.engines import changed
from tests.specrouter.faults import Faults, wait_until

Settings = dict[str, Any]

PROMPT = [5, 17, 300, 42, 9]
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


def open_router(small_config: Settings, **sections: Settings) -> ChainRouter:
    settings = changed(small_config, preload=True)
    for name, section in sections.items():
        settings.setdefault(name, {}).update(section)
    return ChainRouter.from_config(settings)


def ready(router: ChainRouter) -> set[str]:
    """Models that are loaded, timed, and have KV memory."""
    loaded = {name for name in router.pool.names if router.pool.is_loaded(name)}
    assert set(router.instruments.performance().times) == loaded
    assert set(router.instruments.engine_state().kv_bytes) == loaded
    return loaded


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ({"policy": "adaptive"}, {"small", "middle", "target"}),
        ({"policy": "research.policies:PAPER"}, {"small", "middle", "target"}),
        ({"policy": "research.policies:SPECUSTREAM"}, {"small", "target"}),
        ({"policy": "smallest"}, {"small", "target"}),
        ({"policy": "static", "chain": ["middle", "target"]}, {"middle", "target"}),
        ({"policy": "target-only"}, {"target"}),
    ],
)
def test_what_the_policy_may_choose_is_ready_before_the_first_request(
    small_config: Settings, scheduler: Settings, expected: set[str]
) -> None:
    with open_router(small_config, scheduler=scheduler) as router:
        assert ready(router) == expected


def test_without_it_a_drafter_is_loaded_when_it_is_first_used(small_config: Settings) -> None:
    with open_router(small_config, engine={"preload": False}) as router:
        assert ready(router) == {"target"}
        router.generate([PROMPT], GREEDY, Speculation(chain=("middle", "target")))
        assert ready(router) == {"middle", "target"}


def test_nothing_is_evicted_for_it(small_config: Settings) -> None:
    chain = ("small", "middle", "target")
    with open_router(small_config, pool={"max_loaded_models": 2}) as router:
        assert ready(router) == {"small", "target"}
        with pytest.raises(RequestError, match="max_loaded_models") as caught:
            router.generate([PROMPT], GREEDY, Speculation(chain=chain))
    assert caught.value.field == "speculation.chain"


def test_a_drafter_that_fails_meanwhile_rests(
    small_config: Settings, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    faults.failing = {"small"}
    with open_router(small_config) as router:
        assert any(text.startswith("small failed and rests") for text in caplog.messages)
        assert router.instruments.engine_state().quarantined == {"small"}
        assert ready(router) >= {"middle", "target"}
        expected = router.generate([PROMPT], GREEDY, "off")[0].token_ids
        assert router.generate([PROMPT], GREEDY)[0].token_ids == expected
        assert_whole(router)


# While requests are served


def open_early(small_config: Settings, **scheduler: Any) -> ChainRouter:
    settings = changed(small_config, preload=True) | {"scheduler": scheduler}
    return ChainRouter.from_config(settings, loads_later=True)


def test_the_target_serves_before_its_drafters_are_loaded(
    small_config: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "_QUIET_S", 1000.0)
    with open_early(small_config, policy="adaptive") as router:
        assert ready(router) == {"target"}
        assert router.health().loading == ("small", "middle")
        chain = Speculation(chain=("middle", "target"))
        [early] = router.generate([PROMPT], GREEDY, chain)
        assert set(early.metrics.chains) == {("target",)}
        monkeypatch.setattr(engine_thread, "_QUIET_S", 0.001)
        router.instruments.run_idle(lambda: None)
        wait_until(lambda: not router.health().loading)
        assert ready(router) == {"small", "middle", "target"}
        [late] = router.generate([PROMPT], GREEDY, chain)
        assert ("middle", "target") in late.metrics.chains
        assert early.token_ids == late.token_ids
        assert_whole(router)


@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, temperature=1.0, seed=5)])
def test_a_text_stays_the_same_when_a_drafter_comes_while_it_is_made(
    small_config: Settings, monkeypatch: pytest.MonkeyPatch, params: SamplingParams
) -> None:
    params = replace(params, max_new_tokens=24)
    monkeypatch.setattr(engine_thread, "_QUIET_S", 1000.0)
    step, steps = Engine.step, count(1)

    def counted(engine: Engine) -> None:
        step(engine)
        if next(steps) == 4:
            monkeypatch.setattr(engine_thread, "_BUSY_S", 0.0)

    monkeypatch.setattr(Engine, "step", counted)
    with open_early(small_config, policy="static", chain=["middle", "target"]) as router:
        [text] = router.generate([PROMPT], params)
        assert set(text.metrics.chains) == {("target",), ("middle", "target")}
        [alone] = router.generate([PROMPT], params, "off")
        assert text.token_ids == alone.token_ids
        assert_whole(router)


def test_a_drafter_that_cannot_be_loaded_later_is_told_and_serving_goes_on(
    small_config: Settings,
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(engine_thread, "_QUIET_S", 0.001)
    faults.failing = {"small"}
    with open_early(small_config, policy="adaptive") as router:
        wait_until(lambda: not router.health().loading)
        assert any(text.startswith("small failed and rests") for text in caplog.messages)
        assert list(router.health().unloadable) == ["small"]
        assert router.health().status == "ok"
        expected = router.generate([PROMPT], GREEDY, "off")[0].token_ids
        assert router.generate([PROMPT], GREEDY)[0].token_ids == expected
        assert_whole(router)


def test_a_drafter_that_hangs_meanwhile_is_an_error_of_the_start(
    small_config: Settings, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_times, "factor_now", factor_now)  # a forward, though times are kept
    faults.hanging = {"small"}
    with pytest.raises(EngineDeadError, match="a forward of small"):
        open_router(small_config)
    faults.released.set()


@pytest.mark.parametrize("error", [MemoryError("full"), RuntimeError("broken")])
def test_an_engine_that_keeps_failing_meanwhile_is_an_error_of_the_start(
    small_config: Settings, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def load_next(engine: Engine) -> None:
        raise error

    monkeypatch.setattr(Engine, "load_next", load_next)
    with pytest.raises(EngineDeadError, match=str(error)):
        open_router(small_config)
