"""Disturbs one of two replicas under load, again and again, and counts what that changed.

    python -m checks.service.kills [--how kill|stop|restart|pair] [--times 20] [--dtype float64]
        [--venv DIR]

`kill`: SIGKILL, at any time. `stop`: SIGSTOP until all streams have ended. `restart`: a rolling
restart of both. `pair`: the two are halves of a stream pair, each of which is killed at every
moment of a request's way and while nothing runs. In an environment of its own, beside the one of
this process. The last line is JSON; the exit code is 0 if nothing was lost or changed.
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

from checks.service.environment import environment, extra, run_module

if TYPE_CHECKING:
    from specrouter.cluster.router import ClusterRouter
    from specrouter.request.output import RequestOutput
    from tests.specrouter.cluster.streams import Came

_ROUNDS = 3  # of each kind of request: 18 streams
_LATEST_S = 0.5  # of a kill, after the streams have begun
_INSIDE = "--inside"


Texts = list[list["RequestOutput"]]


@dataclass
class Counts:
    """`learnt_ms`: until a loss was known; `resumed_ms`: until the next token of who moved."""

    disturbed: int = 0
    streams: int = 0
    moved: int = 0
    lost: int = 0
    tokens: int = 0
    differ: int = 0
    learnt_ms: list[float] = field(default_factory=list)
    resumed_ms: list[float] = field(default_factory=list)

    def note(self, found: Came, expected: Texts, moved: int, sent_s: float | None) -> None:
        """What came of a load. `sent_s`: when it was disturbed, where that is one moment."""
        from tests.specrouter.cluster.streams import divergences, lost

        tokens, differ = divergences(found, expected)
        self.tokens, self.differ = self.tokens + tokens, self.differ + differ
        self.streams += sum(delta.output is not None for _, _, delta in found)
        self.moved, self.lost = self.moved + moved, self.lost + lost(found)
        if moved and sent_s is not None:
            self.resumed_ms += _resumed_ms(found, sent_s)[-moved:]
        print(f"{moved} streams moved, {differ} texts differ", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="checks.service.kills", description=__doc__)
    parser.add_argument("--how", choices=("kill", "stop", "restart", "pair"), default="kill")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--venv", type=Path, metavar="DIR", help="keeps the environment there")
    parser.add_argument(_INSIDE, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        return _inside(arguments)
    own = ["--how", arguments.how, "--times", str(arguments.times), "--dtype", arguments.dtype]
    with environment(extra("cluster"), arguments.venv, is_beside=True) as python:
        seed = ["--seed", str(arguments.seed)]
        return run_module(python, "checks.service.kills", _INSIDE, *own, *seed)


def _inside(arguments: argparse.Namespace) -> int:
    from checks.exact.models import pool_settings, save_family
    from specrouter import ChainRouter, RouterConfig
    from specrouter.cluster.router import ClusterRouter
    from specrouter.cluster.serve_link import ServeHost
    from tests.specrouter.cluster.streams import KINDS, LONG_PROMPT, PROMPT

    family, is_pair = save_family(Path(tempfile.mkdtemp())), arguments.how == "pair"
    section = {"replicas": [{"name": "r", "count": 2}], "routing": {"policy": "round-robin"}}
    config = RouterConfig.load(
        {
            "pool": pool_settings(family, arguments.dtype),
            "engine": {
                "max_requests": 24,
                "max_model_len": 256,
                "prefill_chunk": 32,
                "prefix_cache": not is_pair,  # else little is handed over
            },
            "cluster": {"pairs": [{"name": "p"}]} if is_pair else section,
        }
    )
    prompt = LONG_PROMPT if is_pair else PROMPT
    with ChainRouter(next(iter(config.replicas().values()))) as one:
        expected = [one.generate([list(prompt)], params) for params in KINDS]
    counts = Counts()
    with ClusterRouter(config, lambda: ServeHost(config, ChainRouter.from_config)) as router:
        asyncio.run(_disturbed(router, arguments, expected, counts))
    print(json.dumps(_report(counts, arguments)))
    allowed = 0.0 if arguments.dtype == "float64" else counts.tokens / 1000
    return int(counts.differ > allowed or counts.lost > 0)


async def _disturbed(
    router: ClusterRouter, arguments: argparse.Namespace, expected: Texts, counts: Counts
) -> None:
    dice = random.Random(arguments.seed)
    if arguments.how == "pair":
        await _killed_at_every_moment(router, expected, counts)
        return
    for number in range(arguments.times):
        after_s = dice.uniform(0.0, _LATEST_S)
        if arguments.how == "restart":
            await _restarted(router, expected, counts)
        elif arguments.how == "stop":
            await _stopped(router, number % 2, after_s, expected, counts)
        else:
            await _killed(router, number % 2, after_s, expected, counts)
        counts.disturbed += 1


async def _struck(
    router: ClusterRouter, which: int, after_s: float, kind: signal.Signals
) -> tuple[int, int, asyncio.Task[Came], float]:
    """Sends a replica a signal while streams run: its process, the moves before, the streams, and
    when it was."""
    process = (await _ready(router))[which]
    before = _moves(router)
    serving = asyncio.create_task(_streams(router))
    await asyncio.sleep(after_s)
    sent_s = time.monotonic()
    os.kill(process, kind)
    return process, before, serving, sent_s


async def _killed(
    router: ClusterRouter, which: int, after_s: float, expected: Texts, counts: Counts
) -> None:
    _, before, serving, sent_s = await _struck(router, which, after_s, signal.SIGKILL)
    while router.health().status == "ok" and not serving.done():
        await asyncio.sleep(0.002)
    counts.learnt_ms.append((time.monotonic() - sent_s) * 1000)
    counts.note(await serving, expected, _moves(router) - before, sent_s)


async def _stopped(
    router: ClusterRouter, which: int, after_s: float, expected: Texts, counts: Counts
) -> None:
    """It goes on once all streams have ended elsewhere; what it says then is heard by nobody."""
    process, before, serving, sent_s = await _struck(router, which, after_s, signal.SIGSTOP)
    try:
        found = await serving
    finally:
        os.kill(process, signal.SIGCONT)
    counts.note(found, expected, _moves(router) - before, sent_s)


async def _restarted(router: ClusterRouter, expected: Texts, counts: Counts) -> None:
    """Load after load, until both are new."""
    old = await _ready(router)
    restarting = asyncio.ensure_future(asyncio.to_thread(router.restart_replicas))
    while not restarting.done():
        before = _moves(router)
        counts.note(await _streams(router), expected, _moves(router) - before, None)
    await restarting
    assert not set(old) & set(await _ready(router)), "both are new"


async def _killed_at_every_moment(router: ClusterRouter, expected: Texts, counts: Counts) -> None:
    from tests.specrouter.cluster.moments import MOMENTS, Moment, WatchedLink

    waits: list[tuple[Moment, int]] = []
    sent_s: list[float] = []

    def come(moment: Moment) -> None:
        if waits and waits[0][0] == moment:
            sent_s.append(time.monotonic())
            os.kill(waits.pop()[1], signal.SIGKILL)

    for moment in (*MOMENTS, None):
        for half in (0, 1):
            process = (await _ready(router))[half]
            before = _moves(router)
            for member in router._fleet.members.values():
                if not isinstance(member.link, WatchedLink):
                    member.link = WatchedLink(member.link, come)
            if moment is None:
                sent_s.append(time.monotonic())
                os.kill(process, signal.SIGKILL)
            else:
                waits.append((moment, process))
            found = await _streams(router)
            assert not waits, f"no request has come to the moment when {moment}"
            print(f"{('p-prefill', 'p-decode')[half]}, {moment or 'while nothing runs'}: ", end="")
            counts.note(found, expected, _moves(router) - before, sent_s.pop())
            counts.disturbed += 1


async def _ready(router: ClusterRouter) -> list[int]:
    """Both serve, and have loaded what is loaded with first requests. Returns their processes."""
    while True:
        while router.health().status != "ok":
            await asyncio.sleep(0.05)
        await _streams(router)
        if router.health().status == "ok":
            break
    links: list[Any] = list(router._host.links)
    return [await asyncio.to_thread(router._loop.run, link.process()) for link in links]


async def _streams(router: ClusterRouter) -> Came:
    from tests.specrouter.cluster.streams import LONG_PROMPT, PROMPT, served

    is_pair = bool(router._context.dispatcher.pairs)
    return await served(router, _ROUNDS, LONG_PROMPT if is_pair else PROMPT)


def _moves(router: ClusterRouter) -> int:
    return sum(sum(member.moves.values()) for member in router._fleet.members.values())


def _resumed_ms(found: Came, sent_s: float) -> list[float]:
    """Of each stream, until its next token; ascending: those that moved are last."""
    following: dict[tuple[int, int], float] = {}
    for came_s, number, delta in found:
        if came_s > sent_s and delta.token_ids:
            following.setdefault((number, delta.index), (came_s - sent_s) * 1000)
    return sorted(following.values())


def _report(counts: Counts, arguments: argparse.Namespace) -> dict[str, object]:
    def median(each: list[float]) -> float | None:
        return round(statistics.median(each), 1) if each else None

    return {
        "how": arguments.how,
        "times": counts.disturbed,
        "dtype": arguments.dtype,
        "streams": counts.streams,
        "moved": counts.moved,
        "lost": counts.lost,
        "texts_that_differ": counts.differ,
        "tokens_up_to_first_divergence": counts.tokens,
        "learnt_ms_p50": median(counts.learnt_ms),
        "next_token_ms_p50": median(counts.resumed_ms),
        "next_token_ms_max": round(max(counts.resumed_ms, default=0.0), 1),
    }


if __name__ == "__main__":
    sys.exit(main())
