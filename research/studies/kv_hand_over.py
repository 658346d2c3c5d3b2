"""What it takes to hand keys and values over between two processes, by Ray's object store.

    python -m research.studies.kv_hand_over [--mib 50] [--rounds 30]

One process exports a row and gives it to the transport, another one takes it and imports it into a
row of its own: all that stands between the halves of a pair but their engines. All in one piece,
and in pieces as prompts are read, where a text waits for the last of them only. Beside it `ray.put`
of as many bytes, alone, and whether all bits are equal, in each of three dtypes. Runs where
`specrouter[cluster]` is installed. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib
import json
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch

from modelpool.attention.kv_view import KVLayer
from specrouter.cluster.kv_transfer import KVTransfer
from specrouter.config import EngineConfig
from statemgr import ModelState, export_row, import_row

_LAYERS, _HEADS, _DIM = 28, 4, 128  # of Qwen2.5-7B
_DTYPES = ("bfloat16", "float32", "float64")  # the first is timed
_CHUNK = EngineConfig().prefill_chunk  # tokens that are read in a cycle
_WARM = 3  # rounds that do not count


class Half:
    """A process with a row of one model."""

    def __init__(self, tokens: int, dtype: str) -> None:
        layer = KVLayer(
            device=torch.device("cpu"),
            dtype=getattr(torch, dtype),
            kv_heads=_HEADS,
            head_dim=_DIM,
            value_dim=_DIM,
        )
        layers = dict.fromkeys(range(_LAYERS), layer)
        self._state = ModelState(layers, 1, tokens + 128)
        self._text = np.arange(tokens + 1)
        self._transport = _link().ObjectStoreTransport()
        self._transfer = KVTransfer(self._transport)

    def read(self) -> None:
        """What a prefill would leave behind."""
        row, text = np.array([0]), self._text[:-1]
        self._state.append(row, np.array([len(text)]), text, np.arange(len(text)))
        for number in range(_LAYERS):
            for part in self._state.store.layer(number):
                part.normal_()

    async def give(self, piece: int) -> tuple[list[str], float]:
        """In pieces of so many tokens; when the last of them was begun, by the machine's clock."""
        last, tickets, begun_s = len(self._text) - 1, list[str](), 0.0
        for start in range(0, last, piece):
            begun_s, stop = time.monotonic(), min(start + piece, last)
            kv = export_row(self._state, 0, start, stop, self._text, "fp")
            tickets.append(await self._transport.give(kv))
        return tickets, begun_s

    async def take(self, tickets: list[str]) -> float:
        """When the row could go on, by the machine's clock."""
        taken = await self._transfer.received(tickets)
        for part in taken.take() if taken else ():
            import_row(self._state, 0, part, self._text, "fp")
        ready_s = time.monotonic()
        self._state.rollback(np.array([0]), np.array([0]))
        return ready_s

    def digest(self) -> str:
        """Of all bits of the row's keys and values."""
        found = hashlib.sha256()
        for number in range(_LAYERS):
            for part in self._state.store.layer(number):
                read = part[: len(self._text) - 1].contiguous().view(torch.uint8)
                found.update(read.numpy().tobytes())
        return found.hexdigest()

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
    parser = argparse.ArgumentParser(prog="research.studies.kv_hand_over", description=__doc__)
    parser.add_argument("--mib", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    print(json.dumps(_measured(arguments.mib, arguments.rounds)))
    return 0


def _measured(mib: int, rounds: int) -> dict[str, Any]:
    link, figures = _link(), dict[str, Any]()
    link.ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=2**30,
        _node_ip_address="127.0.0.1",
    )
    try:
        mailbox = link.start_mailbox()
        for dtype in _DTYPES:
            size = getattr(torch, dtype).itemsize
            tokens = mib * 2**20 // (_LAYERS * 2 * _HEADS * _DIM * size)
            found = _handed_over(tokens, dtype, rounds if dtype == _DTYPES[0] else 1)
            figures = figures or {"mib": mib, "tokens": tokens, "rounds": rounds, **found}
            figures[f"equal_in_{dtype}"] = found["equal"]
        del mailbox
    finally:
        link.ray.shutdown()
    return figures


def _handed_over(tokens: int, dtype: str, rounds: int) -> dict[str, Any]:
    ray = _link().ray
    reads, decodes = (ray.remote(Half).options(num_cpus=1).remote(tokens, dtype) for _ in "12")
    ray.get(reads.read.remote())
    figures = asyncio.run(_rounds(reads, decodes, tokens, rounds))
    one, other = ray.get([reads.digest.remote(), decodes.digest.remote()])
    for half in (reads, decodes):
        ray.kill(half)
    return {"equal": one == other, **figures}


def _link() -> Any:
    """What tells Ray how to be before it imports it."""
    return importlib.import_module("specrouter.cluster.serve_link")


async def _rounds(reads: Any, decodes: Any, tokens: int, rounds: int) -> dict[str, float]:
    """Medians, in milliseconds."""
    whole, given, behind, put = (list[float]() for _ in "1234")
    for number in range(rounds + _WARM):
        put_s = await reads.put.remote()
        [ticket], begun_s = await reads.give.remote(tokens)
        given_s = time.monotonic()
        ready_s = await decodes.take.remote([ticket])
        tickets, last_s = await reads.give.remote(_CHUNK)
        behind_s = await decodes.take.remote(tickets) - last_s
        if number >= _WARM:
            whole.append((ready_s - begun_s) * 1000)
            given.append((given_s - begun_s) * 1000)
            behind.append(behind_s * 1000)
            put.append(put_s * 1000)
    every = sorted(whole)
    return {
        "handed_over_ms": round(statistics.median(whole), 1),
        "handed_over_p90_ms": round(every[len(every) * 9 // 10], 1),
        "of_it_given_ms": round(statistics.median(given), 1),
        "behind_last_piece_ms": round(statistics.median(behind), 1),
        "put_alone_ms": round(statistics.median(put), 1),
        "ratio_to_put": round(statistics.median(whole) / statistics.median(put), 2),
    }


if __name__ == "__main__":
    sys.exit(main())
