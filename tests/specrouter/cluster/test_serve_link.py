"""Replicas in processes of Ray: killed, stopped and restarted, they change no text and lose none.

Skipped where Ray is not installed; `make cluster-test` runs them in an environment of their own.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

if importlib.util.find_spec("ray") is None:  # not imported here: it reads settings as it is
    pytest.skip("needs Ray: make cluster-test", allow_module_level=True)

from specrouter import ChainRouter, RequestOutput, RouterConfig
from specrouter.cluster.router import ClusterRouter
from specrouter.cluster.serve_link import ServeHost, ServeLink
from tests.specrouter.cluster.streams import KINDS, PATIENCE_S, PROMPT, Came, assert_same, served

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config(small_config: dict[str, Any]) -> RouterConfig:
    section = {"replicas": [{"name": "r", "count": 2}], "routing": {"policy": "round-robin"}}
    return RouterConfig.load({**small_config, "cluster": section})


@pytest.fixture(scope="module")
def expected(config: RouterConfig) -> list[list[RequestOutput]]:
    [own, _] = config.replicas().values()
    with ChainRouter(own) as router:
        return [router.generate([list(PROMPT)], params) for params in KINDS]


@pytest.fixture(scope="module")
def router(config: RouterConfig) -> Iterator[ClusterRouter]:
    with ClusterRouter(config, lambda: ServeHost(config, ChainRouter.from_config)) as made:
        yield made


def links(router: ClusterRouter) -> list[ServeLink]:
    return list(router._host.links)  # type: ignore[arg-type]


def process_of(router: ClusterRouter, link: ServeLink) -> int:
    return router._loop.run(link.process(), PATIENCE_S)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.02)


def ready(router: ClusterRouter) -> bool:
    return router.health().status == "ok"


async def disturbed(
    router: ClusterRouter, process: int, what: signal.Signals, after_s: float
) -> tuple[float, Came]:
    """When the signal was sent, and what came."""
    serving = asyncio.ensure_future(served(router, rounds=2))
    await asyncio.sleep(after_s)
    sent_s = time.monotonic()
    os.kill(process, what)
    return sent_s, await serving


def test_two_processes_give_the_texts_of_one_engine(
    router: ClusterRouter, expected: list[list[RequestOutput]]
) -> None:
    assert_same(asyncio.run(served(router)), expected)
    processes = {process_of(router, link) for link in links(router)}
    assert len(processes | {os.getpid()}) == 3
    here = os.getpriority(os.PRIO_PROCESS, 0)
    assert {os.getpriority(os.PRIO_PROCESS, each) for each in processes} == {here}


@pytest.mark.parametrize("after_s", [0.05, 0.2])
def test_a_replica_that_is_killed_changes_no_text(
    router: ClusterRouter, expected: list[list[RequestOutput]], after_s: float
) -> None:
    wait_until(lambda: ready(router))
    asyncio.run(served(router))  # what is loaded at first use is loaded
    process = process_of(router, links(router)[0])
    _, found = asyncio.run(disturbed(router, process, signal.SIGKILL, after_s))
    assert_same(found, expected)
    wait_until(lambda: router.health().status == "degraded" or ready(router))
    wait_until(lambda: ready(router))
    assert process_of(router, links(router)[0]) != process, "Serve has started another one"


def test_a_replica_that_hangs_is_left_and_nothing_comes_twice(
    router: ClusterRouter, expected: list[list[RequestOutput]]
) -> None:
    wait_until(lambda: ready(router))
    asyncio.run(served(router))
    process = process_of(router, links(router)[1])
    try:
        _, found = asyncio.run(disturbed(router, process, signal.SIGSTOP, 0.1))
        assert_same(found, expected)
        moves = router._fleet.members["r-1"].moves
        assert moves["silence"] > 0
        assert router.health().status == "degraded"
    finally:
        os.kill(process, signal.SIGCONT)
    wait_until(lambda: ready(router))
    assert_same(asyncio.run(served(router)), expected)


def test_a_rolling_restart_under_load_changes_nothing(
    router: ClusterRouter, expected: list[list[RequestOutput]]
) -> None:
    wait_until(lambda: ready(router))
    before = [process_of(router, link) for link in links(router)]

    async def both() -> list[Came]:
        restarting = asyncio.ensure_future(asyncio.to_thread(router.restart_replicas))
        rounds: list[Came] = []
        while not restarting.done() or not rounds:
            rounds.append(await served(router))
        await restarting
        return rounds

    for found in asyncio.run(both()):
        assert_same(found, expected)
    after = [process_of(router, link) for link in links(router)]
    assert not set(before) & set(after)
