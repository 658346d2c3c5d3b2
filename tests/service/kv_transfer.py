"""What it takes to hand keys and values over between two processes, by Ray's object store.

    python -m tests.service.kv_transfer [--mib 50] [--rounds 30] [--venv DIR]

One process exports a row and gives it to the transport, another one takes it and imports it into a
row of its own: all that stands between the halves of a pair but their engines. In pieces, as
prompts are read, but one after the other, and all of them at once. Beside it `ray.put` of as many
bytes, alone. Runs in an environment of its own, beside the one of this process. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modelpool.probe import KVLayer
from specrouter.config import EngineConfig
from statemgr import ModelState, export_row, import_row
from tests.service.environment import environment, run_module

_INSIDE = "--inside"
_LAYERS, _HEADS, _DIM = 28, 4, 128  # of Qwen2.5-7B, in bfloat16
_DTYPE = torch.bfloat16
_CHUNK = EngineConfig().prefill_chunk  # tokens that are read in a cycle
_WARM = 3  # rounds that do not count


class Half:
    """A process with a row of one model."""

    def __init__(self, tokens: int) -> None:
        layers = [KVLayer(torch.device("cpu"), _DTYPE, _HEADS, _DIM)] * _LAYERS
        self._state = ModelState(layers, 1, tokens + 128, canonical=True)
        self._text = np.arange(tokens + 1)
        self._transport = _link().ObjectStoreTransport()

    def read(self) -> None:
        """What a prefill would leave behind."""
        row, text = np.array([0]), self._text[:-1]
        self._state.append(row, np.array([len(text)]), text, np.arange(len(text)))
        for number in range(_LAYERS):
            for part in self._state.store.layer(number):
                part.normal_()

    async def give(self) -> list[str]:
        last, tickets = len(self._text) - 1, []
        for start in range(0, last, _CHUNK):
            stop = min(start + _CHUNK, last)
            kv = export_row(self._state, 0, start, stop, self._text, "fp")
            tickets.append(await self._transport.give(kv))
        return tickets

    async def take(self, tickets: list[str]) -> float:
        """When the row could go on, by the machine's clock."""
        for ticket in tickets:
            import_row(self._state, 0, await self._transport.take(ticket), self._text, "fp")
        ready_s = time.monotonic()
        self._state.rollback(np.array([0]), np.array([0]))
        return ready_s

    def bits(self) -> Any:
        return [each.view(torch.int16).numpy() for each in self._state.store.layer(0)]

    def put(self) -> float:
        """Of `ray.put` alone, in seconds."""
        ray = _link().ray
        kv = export_row(self._state, 0, 0, len(self._text) - 1, self._text, "fp")
        started_s = time.monotonic()
        reference = ray.put(kv.data)
        elapsed_s = time.monotonic() - started_s
        del reference
        return elapsed_s


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.service.kv_transfer", description=__doc__)
    parser.add_argument("--mib", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--venv", type=Path, metavar="DIR", help="keeps the environment there")
    parser.add_argument(_INSIDE, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        print(json.dumps(_measured(arguments.mib, arguments.rounds)))
        return 0
    own = ["--mib", str(arguments.mib), "--rounds", str(arguments.rounds)]
    with environment(["ray[serve]"], arguments.venv, is_beside=True) as python:
        return run_module(python, "tests.service.kv_transfer", _INSIDE, *own)


def _measured(mib: int, rounds: int) -> dict[str, Any]:
    link = _link()
    ray, tokens = link.ray, mib * 2**20 // (_LAYERS * 2 * _HEADS * _DIM * _DTYPE.itemsize)
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=2**30,
        _node_ip_address="127.0.0.1",
    )
    try:
        desk = link.start_desk()
        reads, decodes = (ray.remote(Half).options(num_cpus=1).remote(tokens) for _ in "12")
        ray.get(reads.read.remote())
        figures = asyncio.run(_rounds(reads, decodes, rounds))
        equal = all(map(np.array_equal, *(_first(each, tokens) for each in (reads, decodes))))
        del desk
    finally:
        ray.shutdown()
    return {"mib": mib, "tokens": tokens, "rounds": rounds, "equal": equal, **figures}


def _first(half: Any, tokens: int) -> list[Any]:
    return [each[:tokens] for each in _link().ray.get(half.bits.remote())]


def _link() -> Any:
    """What tells Ray how to be before it imports it."""
    return importlib.import_module("specrouter.cluster.serve_link")


async def _rounds(reads: Any, decodes: Any, rounds: int) -> dict[str, float]:
    """Medians, in milliseconds."""
    whole, given, put = list[float](), list[float](), list[float]()
    for number in range(rounds + _WARM):
        put_s = await reads.put.remote()
        started_s = time.monotonic()
        tickets = await reads.give.remote()
        given_s = time.monotonic()
        ready_s = await decodes.take.remote(tickets)
        if number >= _WARM:
            whole.append((ready_s - started_s) * 1000)
            given.append((given_s - started_s) * 1000)
            put.append(put_s * 1000)
    every = sorted(whole)
    return {
        "handed_over_ms": round(statistics.median(whole), 1),
        "handed_over_p90_ms": round(every[len(every) * 9 // 10], 1),
        "of_it_given_ms": round(statistics.median(given), 1),
        "put_alone_ms": round(statistics.median(put), 1),
        "ratio_to_put": round(statistics.median(whole) / statistics.median(put), 2),
    }


if __name__ == "__main__":
    sys.exit(main())
