"""What the page's viewers cost: `python -m checks.service.page.viewers [--config FILE]`.

The same requests in rounds of three: with nobody watching, with viewers of `/router/live` in a
process of their own, and with nobody again (A/A), in turns first. Prints a line per round and, as
JSON in the last line, the medians of the ratios of tokens per second. For a machine that does
nothing else.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.synchronize import Event, Semaphore
from pathlib import Path

import httpx

from checks.service.service import ROOT
from checks.service.streaming import in_process, served, work_of
from specrouter import ChainRouter
from specrouter.bench.conditions import conditions
from specrouter.config import RouterConfig
from specrouter.http.live_feed import FEED_PATH

_AIM = 0.99
_PATIENCE_S = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="checks.service.page.viewers", description=__doc__)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "bench-cpu.yaml")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--viewers", type=int, default=4)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    arguments = parser.parse_args()
    config = RouterConfig.load(arguments.config)
    ratios: dict[str, list[float]] = {"watched": [], "again": []}
    with ChainRouter.from_config(config) as router, served(router) as url:
        in_process(router, work_of(0, arguments.requests, arguments.new_tokens))
        for number in range(1, arguments.rounds + 1):
            work = work_of(number, arguments.requests, arguments.new_tokens)
            turns = ["plain", "watched", "again"]
            speeds = dict[str, float]()
            for turn in turns[number % 3 :] + turns[: number % 3]:
                with watching(url, arguments.viewers) if turn == "watched" else nullcontext():
                    speeds[turn] = in_process(router, work)
            for turn, known in ratios.items():
                known.append(speeds[turn] / speeds["plain"])
            print(f"round {number}: {speeds}", flush=True)
        told = conditions(router)
    found = {turn: round(statistics.median(known), 4) for turn, known in ratios.items()}
    print(json.dumps({**found, "rounds": ratios, "aim": _AIM, "conditions": told}))
    return 0 if found["watched"] >= _AIM else 1


@contextmanager
def watching(url: str, count: int) -> Iterator[None]:
    """So many viewers, each of which has had its first snapshot."""
    context = multiprocessing.get_context("spawn")
    ready, over = context.Semaphore(0), context.Event()
    process = context.Process(target=_watch, args=(url, count, ready, over), daemon=True)
    process.start()
    try:
        for _ in range(count):
            assert ready.acquire(timeout=_PATIENCE_S), "a viewer sees nothing"
        yield
    finally:
        over.set()
        process.join(_PATIENCE_S)


def _watch(url: str, count: int, ready: Semaphore, over: Event) -> None:
    def view() -> None:
        with httpx.stream("GET", url + FEED_PATH, timeout=_PATIENCE_S) as answer:
            answer.raise_for_status()
            for number, line in enumerate(line for line in answer.iter_lines() if line):
                json.loads(line.removeprefix("data: "))
                if not number:
                    ready.release()
                if over.is_set():
                    return

    viewers = [threading.Thread(target=view) for _ in range(count)]
    for viewer in viewers:
        viewer.start()
    for viewer in viewers:
        viewer.join()


if __name__ == "__main__":
    sys.exit(main())
