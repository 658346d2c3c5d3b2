"""What Ray costs: one replica on Ray beside an engine in the service's own process.

    python -m checks.service.cluster_overhead [--rounds 12] [--venv DIR]

Two services of the same models, one thread each, answer 8 streams over HTTP in turns; the clients
are in this process. Without speculation, so that both make the same passes. Services run in an
environment of their own, beside the one of this process; wants a quiet machine. The last line is
JSON: medians over rounds of what is compared within a round, with their quartiles.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

import httpx

from checks.service.environment import environment, extra
from checks.service.load import new_client
from checks.service.service import running, tiny_pool
from specrouter.bench.figures import spread

_STREAMS, _PROMPT, _TOKENS = 8, 64, 96
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
_AIMS = {"tpot_more_ms": 1.0, "ttft_more_ms": 10.0, "throughput": 0.97}


def main() -> int:
    parser = argparse.ArgumentParser(prog="checks.service.cluster_overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--venv", type=Path, metavar="DIR", help="keeps the environment there")
    arguments = parser.parse_args()
    alone = tiny_pool(engine={"max_requests": _STREAMS}, scheduler={"policy": "target-only"})
    there = alone | {"cluster": {"replicas": [{"name": "one", "threads": 1}]}}
    with ExitStack() as stack:
        python = stack.enter_context(environment(extra("cluster"), arguments.venv, is_beside=True))
        services = [
            stack.enter_context(running(config, environment=_ONE_THREAD, python=python))
            for config in (alone, there)
        ]
        urls = [service.url for service in services]
        figures = compare(urls[0], urls[1], arguments.rounds)
        codes = [service.stop() for service in services]
    assert codes == [0, 0], f"the services ended with {codes}"
    print(json.dumps({"aims": _AIMS, **figures}))
    return 0


def compare(here: str, there: str, rounds: int) -> dict[str, Any]:
    """Both take turns in being first; a round before the first warms up."""
    found: dict[str, list[float]] = {name: [] for name in _AIMS}
    for number in range(-1, rounds):
        order = (here, there) if number % 2 else (there, here)
        seen = {url: asyncio.run(_streams(url, number)) for url in order}
        ours, theirs = seen[here], seen[there]
        if number < 0:
            continue
        found["tpot_more_ms"].append(theirs["tpot_ms"] - ours["tpot_ms"])
        found["ttft_more_ms"].append(theirs["ttft_ms"] - ours["ttft_ms"])
        found["throughput"].append(theirs["tokens_per_s"] / ours["tokens_per_s"])
        print(f"round {number + 1}: in-process {_shown(ours)}; on Ray {_shown(theirs)}", flush=True)
    spreads = {name: spread(each) for name, each in found.items()}
    return {
        name: {
            "median": round(one["median"], 3),
            "quartiles": [round(one["low"], 3), round(one["high"], 3)],
        }
        for name, one in spreads.items()
    }


def _shown(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {each:.2f}" for name, each in figures.items())


async def _streams(url: str, seed: int) -> dict[str, float]:
    """As many at once, as a client sees them."""
    async with new_client(url) as client:
        began_s = time.perf_counter()
        came = await asyncio.gather(
            *(_arrivals(client, _body(seed, number)) for number in range(_STREAMS))
        )
        seconds = time.perf_counter() - began_s
    gaps = [(each[-1] - each[0]) / (_TOKENS - 1) for each in came]
    return {
        "ttft_ms": 1000 * statistics.median(each[0] - began_s for each in came),
        "tpot_ms": 1000 * statistics.median(gaps),
        "tokens_per_s": _STREAMS * _TOKENS / seconds,
    }


async def _arrivals(client: httpx.AsyncClient, body: dict[str, Any]) -> list[float]:
    """When each event came but the last, which says that there is no more."""
    found = []
    request = client.build_request("POST", "/v1/completions", json=body)
    answer = (await client.send(request, stream=True)).raise_for_status()
    async with aclosing(answer):
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                found.append(time.perf_counter())
    return found


def _body(seed: int, number: int) -> dict[str, Any]:
    draws = random.Random(f"{seed} {number}")
    return {
        "prompt": [draws.randrange(300, 2000) for _ in range(_PROMPT)],
        "seed": number,
        "max_tokens": _TOKENS,
        "temperature": 1,
        "ignore_eos": True,
        "stream": True,
    }


if __name__ == "__main__":
    sys.exit(main())
