"""A request whose objective is in danger goes on at another replica, once, with the same text."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

import pytest

from specrouter import SLO, ChainRouter, RequestOutput, RouterConfig, SamplingParams
from specrouter.engine.engine import Engine
from specrouter.engine.request_args import RequestArgs
from tests.specrouter.cluster.links import Cluster
from tests.specrouter.faults import PATIENCE_S, wait_until

PROMPT = (5, 17, 300, 42, 9)
PARAMS = SamplingParams(max_new_tokens=40, temperature=0.9, seed=3, ignore_eos=True)
EASY = SLO(tpot_ms=60_000.0)


@pytest.fixture
def may_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, no engine goes beyond its eighth cycle."""
    event, cycles, step = threading.Event(), Counter[int](), Engine.step

    def waiting(engine: Engine) -> None:
        cycles[id(engine)] += 1
        if cycles[id(engine)] > 8:
            event.wait(PATIENCE_S)
        step(engine)

    monkeypatch.setattr(Engine, "step", waiting)
    yield event
    event.set()


def told(speeds_ms: dict[str, float]) -> Any:
    """Replicas that say so of themselves, whatever is true."""

    def make(name: str, config: RouterConfig) -> ChainRouter:
        router = ChainRouter.from_config(config)
        setattr(router, "predicted_tpot_ms", lambda requests: speeds_ms[name])  # noqa: B010
        return router

    return make


def run(
    config: dict[str, Any],
    speeds_ms: dict[str, float],
    endangered: int,
    may_end: threading.Event | None = None,
) -> tuple[list[RequestOutput], Cluster]:
    """Two requests, one at each replica. `may_end`: is set when one has moved."""
    routing = {"policy": "round-robin", "metrics_s": 0.02, "stale_s": 30.0}
    resume = {"silence_s": 30.0, "endangered": endangered}

    async def served(cluster: Cluster) -> list[RequestOutput]:
        asked = [RequestArgs(PROMPT, PARAMS, None, EASY)] * 2
        found: list[RequestOutput] = []
        async with aclosing(cluster.router.astream_each(asked)) as deltas:
            async for _, delta in deltas:
                if delta.output is not None:
                    found.append(delta.output)
        return found

    with Cluster(config, told(speeds_ms), resume=resume, routing=routing) as cluster:
        wait_until(lambda: cluster.router.health().status == "ok")
        with ThreadPoolExecutor(1) as client:
            serving = client.submit(asyncio.run, served(cluster))
            if may_end is not None:
                wait_until(lambda: sum(moves(cluster).values()) > 0)
                may_end.set()
            return serving.result(PATIENCE_S), cluster


def moves(cluster: Cluster) -> dict[str, int]:
    members = cluster.router._fleet.members
    return {name: one.moves["endangered"] for name, one in members.items()}


@pytest.fixture(scope="module")
def config(small_config: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(small_config)


@pytest.fixture(scope="module")
def expected(config: dict[str, Any]) -> RequestOutput:
    with ChainRouter.from_config(config) as router:
        [output] = router.generate([list(PROMPT)], PARAMS)
    return output


def test_it_goes_on_where_it_is_in_time_with_the_same_text(
    config: dict[str, Any], expected: RequestOutput, may_end: threading.Event
) -> None:
    outputs, cluster = run(config, {"a-0": 1e6, "a-1": 1.0}, 1, may_end)
    assert moves(cluster) == {"a-0": 1, "a-1": 0}
    assert [one.token_ids for one in outputs] == [expected.token_ids] * 2
    assert [one.finish_reason for one in outputs] == ["length"] * 2
    records = [one for one in cluster.router.routings() if "would be missed" in one["reason"]]
    assert [one["replica"] for one in records] == ["a-1"]


def test_nobody_moves_where_no_replica_would_be_in_time(config: dict[str, Any]) -> None:
    _, cluster = run(config, {"a-0": 1e6, "a-1": 1e6}, 4)
    assert moves(cluster) == {"a-0": 0, "a-1": 0}


def test_nobody_moves_where_that_is_switched_off(config: dict[str, Any]) -> None:
    _, cluster = run(config, {"a-0": 1e6, "a-1": 1.0}, 0)
    assert moves(cluster) == {"a-0": 0, "a-1": 0}


def test_replicas_that_take_turns_at_being_slow_do_not_throw_it_to_and_fro(
    config: dict[str, Any], expected: RequestOutput
) -> None:
    """Each says that it is slow whenever it is asked a second time."""
    speeds = _Alternating({"a-0": 0, "a-1": 1})
    outputs, cluster = run(config, speeds, 2)
    assert sum(moves(cluster).values()) <= 2 * 2
    assert [one.token_ids for one in outputs] == [expected.token_ids] * 2


class _Alternating(dict[str, float]):
    def __getitem__(self, name: str) -> float:
        phase = int(time.monotonic() / 0.05 + dict.__getitem__(self, name)) % 2
        return 1e6 if phase else 1.0
