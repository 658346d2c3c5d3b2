"""Replicas in processes of Ray: killed, stopped and restarted, they change no text and lose none.

Skipped where Ray is not installed; `make cluster-test` runs them in an environment of their own.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("ray") is None:  # not imported here: it reads settings as it is
    pytest.skip("needs Ray: make cluster-test", allow_module_level=True)

from specrouter import ChainRouter, RouterConfig
from specrouter.cluster.router import ClusterRouter
from specrouter.cluster.serve_link import ServeHost, ServeLink
from test_support.cluster_streams import LONG_KINDS, PATIENCE_S, Came, Load, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config(small_config: dict[str, Any]) -> RouterConfig:
    section = {"replicas": [{"name": "r", "count": 2}], "routing": {"policy": "round-robin"}}
    return RouterConfig.load({**small_config, "cluster": section})


@pytest.fixture(scope="module")
def load(config: RouterConfig) -> Load:
    [own, _] = config.replicas().values()
    return Load.of(own, kinds=LONG_KINDS)


@pytest.fixture(scope="module")
def router(config: RouterConfig) -> Iterator[ClusterRouter]:
    with ClusterRouter(config, lambda: ServeHost(config, ChainRouter.from_config)) as made:
        yield made


def links(router: ClusterRouter) -> list[ServeLink]:
    return list(router._host.links)  # type: ignore[arg-type]


def process_of(router: ClusterRouter, link: ServeLink) -> int:
    return router._loop.start(link.process()).result(PATIENCE_S)


def test_a_link_that_cannot_be_left_keeps_none_from_being_left() -> None:
    left: list[str] = []

    async def leave(name: str) -> None:
        left.append(name)
        raise ConnectionError(f"{name} is gone")

    host = object.__new__(ServeHost)
    host.links = [SimpleNamespace(leave=partial(leave, name)) for name in "ab"]  # type: ignore[misc]
    asyncio.run(host.leave())
    assert left == ["a", "b"]


def ready(router: ClusterRouter) -> bool:
    return router.health().status == "ok"


async def disturbed(
    router: ClusterRouter, load: Load, process: int, what: signal.Signals, after_s: float
) -> Came:
    """What came while a process was sent a signal."""
    serving = asyncio.ensure_future(load.served(router, rounds=2))
    await asyncio.sleep(after_s)
    os.kill(process, what)
    return await serving


def test_two_processes_give_the_texts_of_one_engine(router: ClusterRouter, load: Load) -> None:
    load.check(router)
    processes = {process_of(router, link) for link in links(router)}
    assert len(processes | {os.getpid()}) == 3
    here = os.getpriority(os.PRIO_PROCESS, 0)
    assert {os.getpriority(os.PRIO_PROCESS, each) for each in processes} == {here}


def test_a_replica_that_is_killed_changes_no_text(router: ClusterRouter, load: Load) -> None:
    wait_until(lambda: ready(router))
    asyncio.run(load.served(router))  # what is loaded at first use is loaded
    process = process_of(router, links(router)[0])
    found = asyncio.run(disturbed(router, load, process, signal.SIGKILL, 0.1))
    load.assert_same(found)
    wait_until(lambda: router.health().status == "degraded" or ready(router))
    wait_until(lambda: ready(router))
    assert process_of(router, links(router)[0]) != process, "Serve has started another one"


def test_a_replica_that_hangs_is_left_and_nothing_comes_twice(
    router: ClusterRouter, load: Load
) -> None:
    wait_until(lambda: ready(router))
    asyncio.run(load.served(router))
    process = process_of(router, links(router)[1])
    try:
        found = asyncio.run(disturbed(router, load, process, signal.SIGSTOP, 0.1))
        load.assert_same(found)
        moves = router._fleet.members["r-1"].moves
        assert moves["silence"] > 0
        assert router.health().status == "degraded"
    finally:
        os.kill(process, signal.SIGCONT)
    wait_until(lambda: ready(router))
    load.check(router)


def test_a_rolling_restart_under_load_changes_nothing(router: ClusterRouter, load: Load) -> None:
    wait_until(lambda: ready(router))
    before = [process_of(router, link) for link in links(router)]
    load.check_restart(router)
    after = [process_of(router, link) for link in links(router)]
    assert not set(before) & set(after)
