"""Probe: what others wait for while a service is attacked.

A process of its own asks for `/health` and for small texts, one after the other, and notes how
long each took, from the connection to the last byte.
"""

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import httpx

_PAUSE_S = 0.1
_PATIENCE_S = 120.0


@dataclass
class Waits:
    """Seconds, by what was asked for; and what was not answered with 200."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def worst_s(self) -> float:
        return max(max(times) for times in self.seconds.values())

    def __str__(self) -> str:
        parts = [
            f"{name}: {len(times)} answers, {max(times):.2f} s at worst"
            for name, times in self.seconds.items()
        ]
        return ", ".join(parts)


@contextmanager
def probing(url: str) -> Iterator[Waits]:
    """Filled when the block ends."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_probe, args=(url, theirs), daemon=True)
    process.start()
    assert ours.recv() == "ready"
    waits = Waits()
    try:
        yield waits
    finally:
        ours.send(None)
        if ours.poll(_PATIENCE_S):
            waits.seconds, waits.failures = ours.recv()
        process.join(5)


def _probe(url: str, line: Connection) -> None:
    small = {"prompt": "def f(x):", "max_tokens": 1, "temperature": 0}
    seconds: dict[str, list[float]] = {"/health": [], "a small text": []}
    failures: list[str] = []
    line.send("ready")
    while not line.poll():
        for name, asked in (("/health", None), ("a small text", small)):
            began_s = time.monotonic()
            failure = _asked(url, asked)
            seconds[name].append(time.monotonic() - began_s)
            if failure is not None:
                failures.append(f"{name}: {failure}")
        time.sleep(_PAUSE_S)
    line.send((seconds, failures))


def _asked(url: str, body: dict[str, Any] | None) -> str | None:
    """On a connection of its own, as a probe of Kubernetes; what was wrong."""
    try:
        if body is None:
            answer = httpx.get(f"{url}/health", timeout=_PATIENCE_S)
        else:
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=_PATIENCE_S)
    except httpx.HTTPError as error:
        return repr(error)
    return None if answer.status_code == 200 else f"{answer.status_code}: {answer.text[:200]}"
