"""The service under ten times the load that it can serve: `make soak`.

Measures the capacity first, then sends ten times as many requests, open-loop, streaming and not,
some of whose clients leave. Every accepted request ends in exactly one terminal message, the others
get a 503 with `Retry-After`; memory stays flat; every row is free in the end, and the state is
whole. Then SIGTERM in mid-stream, and drafters that fail and hang under load. Prints a table, and
the figures as JSON in the last line; the exit code is 0 if everything passed.
"""

import argparse
import asyncio
import itertools
import json
import random
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from checks.service.load import (
    Asked,
    Outcome,
    ask,
    broken,
    closed_loop,
    counted,
    new_client,
    open_loop,
)
from checks.service.report import Finding, Report
from checks.service.service import Service, requests_inside, running, tiny_pool, wait_until_idle
from checks.service.watched_service import WELL

_WATCHED = ("-m", "checks.service.watched_service")
_OVERLOAD = 10.0
_WARM_UP_S = 60.0  # kernels for new shapes, and memory that is touched for the first time
_CAPACITY_S = 20.0
_ALLOWED_DRIFT = 0.05
_ROWS = 16
_LIMITS: dict[str, Any] = {
    "engine": {"max_requests": _ROWS, "hang_timeout_s": 1.0},
    "server": {"max_waiting": 16, "drain_s": 60.0},
}
_PROMPTS = (
    "def fibonacci(n):\n", "The sea was calm that morning, and", "import os\n\nclass Cache:\n",
    "Question: Tom has 5 apples and buys 3 more. How many has he?\nAnswer:",
)  # fmt: skip
_CHAINS: tuple[list[str] | None, ...] = (
    None, ["tiny-1m", "tiny-8m"], ["tiny-3m", "tiny-8m"], ["tiny-1m", "tiny-3m", "tiny-8m"],
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="checks.service.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=180.0, help="of overload (default: 180)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=("overload", "SIGTERM", "faults"))
    arguments = parser.parse_args()
    report, figures = Report("soak"), dict[str, Any]()
    checks = {"overload": overload, "SIGTERM": stop_in_midstream, "faults": faults}
    for name in arguments.only or checks:
        check = checks[name]
        print(f"\n{name}", flush=True)
        dtype = "float32" if check is faults else "auto"
        with running(tiny_pool(dtype, **_LIMITS), _WATCHED) as service:
            figures[name] = asyncio.run(check(service, report, arguments))
            stop(service, report, name)
    code = report.show()
    print(json.dumps(figures))
    return code


async def overload(
    service: Service, report: Report, arguments: argparse.Namespace
) -> dict[str, Any]:
    async with new_client(service.url) as client:
        await closed_loop(client, requests(arguments.seed + 1, leaving=False), _ROWS, _WARM_UP_S)
        capacity = await measure_capacity(client, arguments.seed)
        rate = _OVERLOAD * capacity
        print(f"  capacity {capacity:.1f} requests/s; now {rate:.0f} requests/s", flush=True)
        with watched_memory(service) as seen_mb:
            asked = requests(arguments.seed + 2, leaving=True)
            outcomes = await open_loop(client, asked, rate, arguments.seconds, _progress)
        report_outcomes(outcomes, report)
    with report.check("memory stays flat") as finding:
        check_memory(seen_mb, finding)
    with report.check("all rows are free"):
        wait_until_idle(service.url)
    return {
        "capacity_requests_per_s": round(capacity, 1),
        "sent_requests_per_s": round(rate, 1),
        "seconds": arguments.seconds,
        **counted(outcomes),
        "rss_mb": [round(seen) for seen in seen_mb[:: max(1, len(seen_mb) // 12)]],
    }


def report_outcomes(outcomes: list[Outcome], report: Report) -> None:
    counts = counted(outcomes)
    with report.check("every accepted request ends in exactly one terminal message") as finding:
        finding.text = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        assert not broken(outcomes), f"{counts['broken']} broken: {broken(outcomes)[:3]}"
        assert not counts["gone"], f"{counts['gone']} have no answer"
        assert counts["complete"]
        assert counts["left"]
    with report.check("the rest is refused with 503 and Retry-After"):
        reasons = Counter(outcome.reason for outcome in outcomes if outcome.kind == "refused")
        assert set(reasons) == {"overloaded"}, reasons


async def measure_capacity(client: httpx.AsyncClient, seed: int) -> float:
    """Requests per second that are completed with all rows in use."""
    began_s = time.monotonic()
    asked = requests(seed, leaving=False)
    outcomes = await closed_loop(client, asked, _ROWS + 4, _CAPACITY_S)
    assert not broken(outcomes), broken(outcomes)[:3]
    return counted(outcomes)["complete"] / (time.monotonic() - began_s)


async def stop_in_midstream(
    service: Service, report: Report, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Streams run and more keep coming when SIGTERM does."""
    async with new_client(service.url) as client:
        generator = random.Random(arguments.seed)
        bodies = [_asked(generator, stream=True, tokens=400).body for _ in range(_ROWS)]
        streams = [Asked({**body, "n": 1}) for body in bodies]
        accepted = [asyncio.create_task(ask(client, asked)) for asked in streams]
        await _until_inside(service, len(streams))
        service.signal(signal.SIGTERM)
        began_s = time.monotonic()
        await asyncio.sleep(0.6)  # the signal is looked for every 0.2 s
        late = requests(arguments.seed, leaving=False)
        refused: list[Outcome] = []
        while not all(task.done() for task in accepted):
            refused.append(await ask(client, next(late)))
            await asyncio.sleep(0.02)
        took_s = time.monotonic() - began_s
        outcomes = await asyncio.gather(*accepted)
    with report.check("running streams finish after SIGTERM") as finding:
        finding.text = f"{len(outcomes)} streams, within {took_s:.1f} s"
        counts = counted(outcomes)
        assert counts == {"complete": len(streams)}, f"{counts}: {broken(outcomes)[:3]}"
        assert took_s < _LIMITS["server"]["drain_s"]
    with report.check("new requests get 503 meanwhile") as finding:
        counts = counted(refused)
        finding.text = f"{counts['refused']} refused"
        assert counts["refused"]
        assert set(counts) <= {"refused", "gone"}, f"{counts}: {broken(refused)[:3]}"
        kinds = [outcome.kind for outcome in refused]
        assert kinds == sorted(kinds, reverse=True), "it is gone before the last refusal"
        assert {one.reason for one in refused if one.kind == "refused"} == {"shutting_down"}
    return {"streams": len(outcomes), "refused": counts["refused"], "drain_s": round(took_s, 1)}


async def _until_inside(service: Service, count: int) -> None:
    """A stream that the service has not read yet would be a new one to it."""
    deadline = time.monotonic() + 60
    while sum(await asyncio.to_thread(requests_inside, service.url)) < count:
        assert time.monotonic() < deadline, "the streams do not begin"
        await asyncio.sleep(0.05)


async def faults(service: Service, report: Report, arguments: argparse.Namespace) -> dict[str, Any]:
    """A drafter raises from a moment on: no request is lost or changed."""
    async with new_client(service.url) as client:
        generator = random.Random(arguments.seed)
        plain = [_asked(generator, stream=bool(i % 2), tokens=64).body for i in range(12)]
        off = [{**body, "speculation": "off"} for body in plain]
        expected = await asyncio.gather(*(ask(client, Asked(body)) for body in off))
        assert counted(list(expected)) == {"complete": len(plain)}, broken(list(expected))[:3]
        drafted = [
            ({**body, "speculation": {"chain": chain}} if chain else body, answer)
            for body, answer in zip(plain, expected, strict=True)
            for chain in _CHAINS
        ]
        outcomes, phase = list[tuple[Outcome, Outcome]](), ""
        for phase, number in (("well", 0), ("failing", signal.SIGUSR1)):
            if number:
                loop = asyncio.get_running_loop()
                loop.call_later(1.0, service.signal, number)  # in the midst of requests
            began_s = time.monotonic()
            outcomes += await _all_of(client, drafted)
            print(f"  {phase}: {len(drafted)} in {time.monotonic() - began_s:.1f} s", flush=True)
    with report.check("no request is lost to a drafter that fails") as finding:
        finding.text = f"{len(outcomes)} requests"
        got = [outcome for outcome, _ in outcomes]
        assert counted(got) == {"complete": len(outcomes)}, broken(got)[:3]
    with report.check("texts are those without speculation"):
        changed = [pair for pair in outcomes if pair[0].texts != pair[1].texts]
        assert not changed, f"{len(changed)} of {len(outcomes)}, the first: {changed[0]}"
    with report.check("the fault took place"):
        log = service.log.read_text(errors="replace")
        assert "injected: this drafter has failed" in log
    with report.check("all rows are free after faults"):
        wait_until_idle(service.url)
    return {"requests": len(outcomes), "changed": len(changed)}


async def _all_of(
    client: httpx.AsyncClient, asked: list[tuple[dict[str, Any], Outcome]]
) -> list[tuple[Outcome, Outcome]]:
    """Each with what it should be; as many at a time as there are rows."""
    rows = asyncio.Semaphore(_ROWS)

    async def one(body: dict[str, Any], expected: Outcome) -> tuple[Outcome, Outcome]:
        async with rows:
            return await ask(client, Asked(body)), expected

    return list(await asyncio.gather(*(one(*each) for each in asked)))


def stop(service: Service, report: Report, name: str) -> None:
    with report.check(f"exit code 0 and whole state after {name}"):
        code = service.stop()
        assert service.process.stdout is not None
        said = service.process.stdout.read()
        assert code == 0, f"{code}\n{service.log_tail()}"
        assert WELL in said, said


def requests(seed: int, leaving: bool) -> Iterator[Asked]:
    """Without an end: half of them stream, and of those that may leave a quarter does."""
    generator = random.Random(seed)
    for _ in itertools.count():
        asked = _asked(generator, generator.random() < 0.5, generator.randint(16, 64))
        if leaving and generator.random() < 0.25:
            streams = asked.body["stream"]
            after = generator.randint(1, 8) if streams else generator.uniform(0.05, 2.0)
            asked = Asked(asked.body, after)
        yield asked


def _asked(generator: random.Random, stream: bool, tokens: int) -> Asked:
    body: dict[str, Any] = {
        "prompt": generator.choice(_PROMPTS) * generator.randint(1, 3),
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": generator.choice((0.0, 1.0)),
        "seed": generator.randrange(2**32),
        "stream": stream,
    }
    if generator.random() < 0.1:
        body["n"] = 2
    return Asked(body)


@contextmanager
def watched_memory(service: Service) -> Iterator[list[float]]:
    """The service's resident memory in MiB, each second while the block runs."""
    seen_mb, over = list[float](), threading.Event()

    def watch() -> None:
        while not over.wait(1.0):
            seen_mb.append(service.rss_mb())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen_mb
    finally:
        over.set()
        thread.join()


def check_memory(seen_mb: list[float], finding: Finding) -> None:
    """The first third is warm-up."""
    settled = seen_mb[len(seen_mb) // 3 :]
    middle = statistics.median(settled)
    drift = max(abs(seen - middle) for seen in settled) / middle
    finding.text = f"{middle:.0f} MiB within {100 * drift:.1f}%"
    assert drift <= _ALLOWED_DRIFT, f"{finding.text}: {[round(seen) for seen in seen_mb]}"


def _progress(counts: Counter[str]) -> None:
    print(f"  {', '.join(f'{count} {kind}' for kind, count in counts.items())}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
