"""What streaming over HTTP costs: `python -m checks.service.streaming [--config FILE]`.

The same requests, in alternating rounds: as 16 streams of `/v1/completions`, whose clients are in a
process of their own, and by `ChainRouter.generate` in this one. One engine serves both, in the
process of the service, as always. Prints a line per round and, as JSON in the last line, the median
of the ratios of tokens per second. For a machine that does nothing else.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvicorn

from checks.service.load import Asked, ask, new_client
from checks.service.service import ROOT
from specrouter import ChainRouter, SamplingParams
from specrouter.bench.conditions import conditions
from specrouter.bench.prompts import BUILT_IN
from specrouter.config import RouterConfig
from specrouter.http.app import create_app
from specrouter.http.drain import Drain
from specrouter.http.guards import add_guards
from specrouter.http.request_log import RequestLog
from specrouter.http.transport import protocol_settings

_AIM = 0.95
_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Work:
    """The requests of a round."""

    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    new_tokens: int

    @property
    def tokens(self) -> int:
        return len(self.prompts) * self.new_tokens


def main() -> int:
    parser = argparse.ArgumentParser(prog="checks.service.streaming", description=__doc__)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "bench-cpu.yaml")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=96)
    arguments = parser.parse_args()
    config = RouterConfig.load(arguments.config)
    works = [
        work_of(number, arguments.streams, arguments.new_tokens)
        for number in range(arguments.rounds + 1)
    ]
    with ChainRouter.from_config(config) as router, served(router) as url, clients(url) as line:
        in_process(router, works[0])  # both ways once, before anything counts
        _over_http(line, works[0])
        rounds = [_round(router, line, work, i) for i, work in enumerate(works[1:])]
        known = conditions(router)
    ratio = statistics.median(http / plain for plain, http in rounds)
    print(f"streaming has {ratio:.3f} of the tokens per second in-process (aim: {_AIM})")
    figures = {
        "ratio": round(ratio, 4),
        "in_process_tokens_per_s": [round(plain, 1) for plain, _ in rounds],
        "http_tokens_per_s": [round(http, 1) for _, http in rounds],
        "streams": arguments.streams,
        "new_tokens": arguments.new_tokens,
        "conditions": known,
    }
    print(json.dumps(figures))
    return 0 if ratio >= _AIM else 1


def work_of(number: int, streams: int, new_tokens: int) -> Work:
    """A round's own prompts; sampled, as most traffic is."""
    generator = random.Random(number)
    texts = [text for category in BUILT_IN.values() for text in category]
    prompts = tuple(generator.choice(texts) for _ in range(streams))
    seeds = tuple(generator.randrange(2**32) for _ in range(streams))
    return Work(prompts, seeds, new_tokens)


def _round(router: ChainRouter, line: Connection, work: Work, number: int) -> tuple[float, float]:
    """Tokens per second in-process and over HTTP, in turns first."""
    if number % 2:
        http, load = _over_http(line, work)
        plain = in_process(router, work)
    else:
        plain = in_process(router, work)
        http, load = _over_http(line, work)
    print(
        f"round {number + 1}: {plain:.1f} tokens/s in-process, {http:.1f} over HTTP, "
        f"ratio {http / plain:.3f}, the clients took {load:.0%} of a core",
        flush=True,
    )
    return plain, http


def in_process(router: ChainRouter, work: Work) -> float:
    params = [
        SamplingParams(max_new_tokens=work.new_tokens, temperature=1.0, seed=seed, ignore_eos=True)
        for seed in work.seeds
    ]
    began_s = time.perf_counter()
    outputs = router.generate(list(work.prompts), params)
    took_s = time.perf_counter() - began_s
    assert sum(len(output.token_ids) for output in outputs) == work.tokens
    return work.tokens / took_s


def _over_http(line: Connection, work: Work) -> tuple[float, float]:
    """Measured where the clients are, from the first request to the last `[DONE]`; and how much of
    a core the clients themselves took."""
    line.send(work)
    if not line.poll(_PATIENCE_S):
        raise RuntimeError("the clients do not answer")
    answer = line.recv()
    if isinstance(answer, str):
        raise RuntimeError(answer)
    took_s, load = answer
    return work.tokens / took_s, load


@contextmanager
def served(router: ChainRouter) -> Iterator[str]:
    """The whole service in front of `router`, on a free port, in a thread of this process."""
    drain = Drain()
    app = create_app(router, drain)
    add_guards(app, router.config.server, drain)
    settings = protocol_settings(router.config.server)
    server = uvicorn.Server(
        uvicorn.Config(RequestLog(app), port=0, log_config=None, access_log=False, **settings)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + _PATIENCE_S
    while not server.started:
        assert thread.is_alive(), "the service did not start"
        assert time.monotonic() < deadline, "the service does not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def clients(url: str) -> Iterator[Connection]:
    """A process that sends each `Work` that it is given, and answers with the seconds it took."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer_works, args=(url, theirs), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        ours.send(None)
        process.join(_PATIENCE_S)


def _answer_works(url: str, line: Connection) -> None:
    asyncio.run(_answer(url, line))


async def _answer(url: str, line: Connection) -> None:
    async with new_client(url) as client:
        while (work := line.recv()) is not None:
            requests = [Asked(_body(work, index)) for index in range(len(work.prompts))]
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            outcomes = await asyncio.gather(*(ask(client, asked) for asked in requests))
            took_s = time.perf_counter() - began_s
            cpu_s = time.process_time() - began_cpu_s
            reasons = [one.reason or one.kind for one in outcomes if one.kind != "complete"]
            tokens = sum(outcome.tokens for outcome in outcomes)
            if reasons or tokens != work.tokens:
                line.send(f"{reasons[:3]}, {tokens} tokens of {work.tokens}")
            else:
                line.send((took_s, cpu_s / took_s))


def _body(work: Work, index: int) -> dict[str, Any]:
    return {
        "prompt": work.prompts[index],
        "seed": work.seeds[index],
        "max_tokens": work.new_tokens,
        "temperature": 1,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


if __name__ == "__main__":
    sys.exit(main())
