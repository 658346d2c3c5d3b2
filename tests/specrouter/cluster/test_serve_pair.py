"""A stream pair on Ray: the texts of one engine, whichever half is killed.

Skipped where Ray is not installed; `make cluster-test` runs it in an environment of its own.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import time
from typing import Any

import pytest

if importlib.util.find_spec("ray") is None:  # not imported here: it reads settings as it is
    pytest.skip("needs Ray: make cluster-test", allow_module_level=True)

from specrouter import ChainRouter, RouterConfig
from specrouter.cluster.router import ClusterRouter
from specrouter.cluster.serve_link import ServeHost
from tests.specrouter.cluster.streams import KINDS, PATIENCE_S, PROMPT, Came, assert_same, served

pytestmark = pytest.mark.slow


def wait_until_ready(router: ClusterRouter) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while router.health().status != "ok":
        assert time.monotonic() < deadline, "it does not come back"
        time.sleep(0.02)


def imported(router: ClusterRouter) -> int:
    """Tokens whose keys and values the decode half had from the other one."""
    member = router._fleet.members["p-decode"]
    return 0 if member.report is None else member.report.engine.cache.imported_tokens


async def killed(router: ClusterRouter, process: int) -> Came:
    serving = asyncio.ensure_future(served(router, rounds=2))
    await asyncio.sleep(0.2)
    os.kill(process, signal.SIGKILL)
    return await serving


def test_a_pair_on_ray_gives_the_texts_of_one_engine_whichever_half_is_killed(
    small_config: dict[str, Any],
) -> None:
    engine = {**small_config["engine"], "prefix_cache": False}  # what is not handed over is read
    settings = {**small_config, "engine": engine, "cluster": {"pairs": [{"name": "p"}]}}
    config = RouterConfig.load(settings)
    with ChainRouter(config.replicas()["p-decode"]) as one:
        expected = [one.generate([list(PROMPT)], params) for params in KINDS]
    samples = sum(params.n for params in KINDS)
    with ClusterRouter(config, lambda: ServeHost(config, ChainRouter.from_config)) as router:
        assert_same(asyncio.run(served(router)), expected)
        deadline = time.monotonic() + PATIENCE_S
        while imported(router) < samples * len(PROMPT) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert imported(router) == samples * len(PROMPT), "no prompt was read by both"
        for link in router._host.links:
            wait_until_ready(router)
            process = router._loop.run(link.process(), PATIENCE_S)  # type: ignore[attr-defined]
            assert_same(asyncio.run(killed(router, process)), expected)
