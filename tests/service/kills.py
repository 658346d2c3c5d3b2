"""Kills one of two replicas under load, again and again, and counts what that changed.

    python -m tests.service.kills [--kills 20] [--dtype float64] [--venv DIR]

Runs in an environment of its own, beside the one of this process. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.service.environment import environment, run_module

if TYPE_CHECKING:
    from specrouter.cluster.router import ClusterRouter
    from specrouter.request.output import RequestOutput
    from tests.specrouter.cluster.streams import Came

_ROUNDS = 3  # of each kind of request: 18 streams
_LATEST_S = 0.5  # of a kill, after the streams have begun
_INSIDE = "--inside"


@dataclass
class Kills:
    """`learnt_ms`: until a loss was known; `resumed_ms`: until the next token of who moved."""

    streams: int = 0
    moved: int = 0
    tokens: int = 0
    differ: int = 0
    learnt_ms: list[float] = field(default_factory=list)
    resumed_ms: list[float] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.service.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--venv", type=Path, metavar="DIR", help="keeps the environment there")
    parser.add_argument(_INSIDE, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        return _inside(arguments)
    own = ["--kills", str(arguments.kills), "--dtype", arguments.dtype]
    with environment(["ray[serve]"], arguments.venv, is_beside=True) as python:
        seed = ["--seed", str(arguments.seed)]
        return run_module(python, "tests.service.kills", _INSIDE, *own, *seed)


def _inside(arguments: argparse.Namespace) -> int:
    from specrouter import ChainRouter, RouterConfig
    from specrouter.cluster.router import ClusterRouter
    from specrouter.cluster.serve_link import ServeHost
    from tests.exact.models import pool_settings, save_family
    from tests.specrouter.cluster.streams import KINDS, PROMPT

    family = save_family(Path(tempfile.mkdtemp()))
    section = {"replicas": [{"name": "r", "count": 2}], "routing": {"policy": "round-robin"}}
    config = RouterConfig.load(
        {
            "pool": pool_settings(family, arguments.dtype),
            "engine": {"max_requests": 24, "max_model_len": 256, "prefill_chunk": 32},
            "cluster": section,
        }
    )
    with ChainRouter(config.replicas()["r-0"]) as one:
        expected = [one.generate([list(PROMPT)], params) for params in KINDS]
    counts, dice = Kills(), random.Random(arguments.seed)
    with ClusterRouter(config, lambda: ServeHost(config, ChainRouter.from_config)) as router:
        for number in range(arguments.kills):
            asyncio.run(_killed(router, number % 2, dice.uniform(0.0, _LATEST_S), expected, counts))
    print(json.dumps(_report(counts, arguments)))
    allowed = 0.0 if arguments.dtype == "float64" else counts.tokens / 1000
    return int(counts.differ > allowed)


async def _killed(
    router: ClusterRouter,
    which: int,
    after_s: float,
    expected: list[list[RequestOutput]],
    counts: Kills,
) -> None:
    from tests.specrouter.cluster.streams import divergences, served

    while router.health().status != "ok":
        await asyncio.sleep(0.05)
    await served(router)  # a new process loads drafters with its first requests
    moved = _moves(router)
    link: Any = router._host.links[which]
    process = await asyncio.to_thread(lambda: router._loop.run(link.process()))
    serving = asyncio.ensure_future(served(router, _ROUNDS))
    await asyncio.sleep(after_s)
    sent_s = time.monotonic()
    os.kill(process, signal.SIGKILL)
    while router.health().status == "ok" and not serving.done():
        await asyncio.sleep(0.002)
    counts.learnt_ms.append((time.monotonic() - sent_s) * 1000)
    found = await serving
    tokens, differ = divergences(found, expected)
    moved = _moves(router) - moved
    counts.tokens, counts.differ = counts.tokens + tokens, counts.differ + differ
    counts.moved += moved
    counts.streams += sum(delta.output is not None for _, _, delta in found)
    counts.resumed_ms += _resumed_ms(found, sent_s)[-moved:] if moved else []
    print(f"{moved} streams moved, {differ} texts differ", flush=True)


def _resumed_ms(found: Came, sent_s: float) -> list[float]:
    """Of each stream, from the kill to its next token; ascending: those that moved are last."""
    following: dict[tuple[int, int], float] = {}
    for came_s, number, delta in found:
        if came_s > sent_s and delta.token_ids:
            following.setdefault((number, delta.index), (came_s - sent_s) * 1000)
    return sorted(following.values())


def _moves(router: ClusterRouter) -> int:
    return sum(sum(member.moves.values()) for member in router._fleet.members.values())


def _report(counts: Kills, arguments: argparse.Namespace) -> dict[str, object]:
    return {
        "kills": arguments.kills,
        "dtype": arguments.dtype,
        "streams": counts.streams,
        "moved": counts.moved,
        "texts_that_differ": counts.differ,
        "tokens_up_to_first_divergence": counts.tokens,
        "learnt_ms_p50": round(statistics.median(counts.learnt_ms), 1),
        "next_token_ms_p50": round(statistics.median(counts.resumed_ms or [0.0]), 1),
        "next_token_ms_max": round(max(counts.resumed_ms, default=0.0), 1),
    }


if __name__ == "__main__":
    sys.exit(main())
