"""Disturbs one of two replicas under load, again and again, and counts what that changed.

    python -m checks.service.kills [--how kill|fail|stop|restart|pair] [--times 20]
        [--dtype float64] [--venv DIR]

`kill`: SIGKILL, at any time. `fail`: its engine fails, at any time. `stop`: SIGSTOP until all
streams have ended. `restart`: a rolling restart of both. `pair`: the two are halves of a stream
pair, each of which is killed at every moment of a request's way and while nothing runs. In an
environment of its own, beside the one of this process. The last line is JSON; the exit code is 0 if
nothing was lost or changed.
"""

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
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from checks.service.environment import add_cluster_options, run_in_cluster
from specrouter import ChainRouter, RouterConfig
from specrouter.cluster.router import ClusterRouter
from test_support.cluster_moments import MOMENTS, Moment, WatchedLink
from test_support.cluster_streams import LONG_KINDS, LONG_PROMPT, PROMPT, Came, Load, lost
from test_support.families import pool_settings, save_family

_ROUNDS = 3  # of each kind of request: 18 streams
_LATEST_S = 0.5  # of a kill, after the streams have begun


@dataclass(kw_only=True)
class Counts:
    """`learnt_ms`: until a loss was known; `resumed_ms`: until the next token of who moved."""

    times: int = 0
    streams: int = 0
    moved: int = 0
    lost: int = 0
    texts_that_differ: int = 0
    tokens_up_to_first_divergence: int = 0
    learnt_ms: list[float] = field(default_factory=list)
    resumed_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Disturbance:
    """Of a router's replicas under a load, and what came of it."""

    router: ClusterRouter
    load: Load
    counts: Counts
    failing: Path

    async def begin(self, how: str, times: int, seed: int) -> None:
        dice = random.Random(seed)
        if how == "pair":
            await self._kill_at_every_moment()
            return
        for number in range(times):
            after_s = dice.uniform(0.0, _LATEST_S)
            if how == "restart":
                await self._restart()
            elif how == "stop":
                await self._stop(number % 2, after_s)
            elif how == "fail":
                await self._kill(number % 2, after_s, lambda one: (self.failing / str(one)).touch())
            else:
                await self._kill(number % 2, after_s, _killed)
            self.counts.times += 1

    def _note(self, found: Came, before: int, sent_s: float | None) -> None:
        """What came of a load. `before`: moves. `sent_s`: when it was disturbed, where that is one
        moment."""
        counts, moved = self.counts, self._moves() - before
        tokens, differ = self.load.divergences(found)
        counts.tokens_up_to_first_divergence += tokens
        counts.texts_that_differ += differ
        counts.streams += sum(delta.output is not None for _, _, delta in found)
        counts.moved, counts.lost = counts.moved + moved, counts.lost + lost(found)
        if moved and sent_s is not None:
            counts.resumed_ms += _resumed_ms(found, sent_s)[-moved:]
        print(f"{moved} streams moved, {differ} texts differ", flush=True)

    async def _struck(
        self, which: int, after_s: float, strike: Callable[[int], None]
    ) -> tuple[int, int, asyncio.Task[Came], float]:
        """Strikes a replica's process while streams run: the process, the moves before, the
        streams, and when it was."""
        process = (await self._ready())[which]
        before = self._moves()
        serving = asyncio.create_task(self.load.served(self.router, _ROUNDS))
        await asyncio.sleep(after_s)
        sent_s = time.monotonic()
        strike(process)
        return process, before, serving, sent_s

    async def _kill(self, which: int, after_s: float, strike: Callable[[int], None]) -> None:
        _, before, serving, sent_s = await self._struck(which, after_s, strike)
        while self.router.health().status == "ok" and not serving.done():
            await asyncio.sleep(0.002)
        self.counts.learnt_ms.append((time.monotonic() - sent_s) * 1000)
        self._note(await serving, before, sent_s)

    async def _stop(self, which: int, after_s: float) -> None:
        """It goes on once all streams have ended elsewhere; nobody hears what it says then."""
        process, before, serving, sent_s = await self._struck(
            which, after_s, lambda one: os.kill(one, signal.SIGSTOP)
        )
        try:
            found = await serving
        finally:
            os.kill(process, signal.SIGCONT)
        self._note(found, before, sent_s)

    async def _restart(self) -> None:
        """Load after load, until both are new."""
        old = await self._ready()
        restarting = asyncio.ensure_future(asyncio.to_thread(self.router.restart_replicas))
        while not restarting.done():
            before = self._moves()
            self._note(await self.load.served(self.router, _ROUNDS), before, None)
        await restarting
        assert not set(old) & set(await self._ready()), "both are new"

    async def _kill_at_every_moment(self) -> None:
        waits: list[tuple[Moment, int]] = []
        sent_s: list[float] = []

        def come(moment: Moment) -> None:
            if waits and waits[0][0] == moment:
                sent_s.append(time.monotonic())
                os.kill(waits.pop()[1], signal.SIGKILL)

        for moment in (*MOMENTS, None):
            for half, name in enumerate(("p-prefill", "p-decode")):
                process = (await self._ready())[half]
                before = self._moves()
                for member in self.router._fleet.members.values():
                    if not isinstance(member.link, WatchedLink):
                        member.link = WatchedLink(member.link, come)
                if moment is None:
                    sent_s.append(time.monotonic())
                    os.kill(process, signal.SIGKILL)
                else:
                    waits.append((moment, process))
                found = await self.load.served(self.router, _ROUNDS)
                assert not waits, f"no request has come to the moment when {moment}"
                print(f"{name}, {moment or 'while nothing runs'}: ", end="")
                self._note(found, before, sent_s.pop())
                self.counts.times += 1

    async def _ready(self) -> list[int]:
        """Both serve, and have loaded what is loaded with first requests. Returns their
        processes."""
        while True:
            while self.router.health().status != "ok":
                await asyncio.sleep(0.05)
            await self.load.served(self.router, _ROUNDS)
            if self.router.health().status == "ok":
                break
        links: list[Any] = list(self.router._host.links)
        run = self.router._loop.run
        return [await asyncio.to_thread(run, link.process()) for link in links]

    def _moves(self) -> int:
        return sum(sum(member.moves.values()) for member in self.router._fleet.members.values())


def _killed(process: int) -> None:
    os.kill(process, signal.SIGKILL)


def _router(failing: Path, config: RouterConfig) -> ChainRouter:
    """In a replica's process. Its engine fails once `failing` has a file of the process' number."""
    from specrouter.engine.step import DecodingStep

    run, mark = DecodingStep.run, failing / str(os.getpid())

    def planted(step: DecodingStep) -> None:
        if mark.exists():
            raise RuntimeError("planted")
        run(step)

    DecodingStep.run = planted  # type: ignore[assignment,method-assign]
    return ChainRouter.from_config(config)


def main() -> int:
    parser = argparse.ArgumentParser(prog="checks.service.kills", description=__doc__)
    parser.add_argument(
        "--how", choices=("kill", "fail", "stop", "restart", "pair"), default="kill"
    )
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--seed", type=int, default=1)
    add_cluster_options(parser)
    arguments = parser.parse_args()
    code = run_in_cluster("checks.service.kills", arguments)
    return _inside(arguments) if code is None else code


def _inside(arguments: argparse.Namespace) -> int:
    from specrouter.cluster.serve_link import ServeHost  # imports Ray

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
    one = next(iter(config.replicas().values()))
    load = Load.of(one, LONG_PROMPT if is_pair else PROMPT, LONG_KINDS)
    counts, failing = Counts(), Path(tempfile.mkdtemp())
    plain = ChainRouter.from_config
    make = partial(_router, failing) if arguments.how == "fail" else plain
    host = partial(ServeHost, config, make)
    with ClusterRouter(config, host) as router:
        disturbance = Disturbance(router, load, counts, failing)
        asyncio.run(disturbance.begin(arguments.how, arguments.times, arguments.seed))
    print(json.dumps(_report(counts, arguments)))
    exact = arguments.dtype == "float64"
    allowed = 0.0 if exact else counts.tokens_up_to_first_divergence / 1000
    return int(counts.texts_that_differ > allowed or counts.lost > 0)


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
        "dtype": arguments.dtype,
        **{name: value for name, value in vars(counts).items() if isinstance(value, int)},
        "learnt_ms_p50": median(counts.learnt_ms),
        "next_token_ms_p50": median(counts.resumed_ms),
        "next_token_ms_max": round(max(counts.resumed_ms, default=0.0), 1),
    }


if __name__ == "__main__":
    sys.exit(main())
