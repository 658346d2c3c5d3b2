"""Streams of all kinds at once, and whether they are what one engine gives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from specrouter import RequestOutput, SamplingParams
from specrouter.cluster.router import ClusterRouter
from specrouter.engine.request_args import RequestArgs
from specrouter.request.output import Delta
from specrouter.request.structure import Structure

PROMPT = (5, 17, 300, 42, 9)
LONG_PROMPT = tuple(5 + 7 * at % 300 for at in range(75))  # three chunks of 32
PATIENCE_S = 120.0
JSON = Structure("json_schema", {"type": "array", "items": {"type": "integer"}, "maxItems": 9})
KINDS = [
    SamplingParams(max_new_tokens=120, ignore_eos=True),
    SamplingParams(max_new_tokens=120, temperature=0.9, seed=3, ignore_eos=True),
    SamplingParams(max_new_tokens=90, temperature=0.7, seed=5, presence_penalty=0.8, logprobs=1),
    SamplingParams(max_new_tokens=60, temperature=1.0, seed=8, structure=JSON),
    SamplingParams(max_new_tokens=100, temperature=1.0, seed=9, n=2, ignore_eos=True),
]

_FAILED = ("error", "cancelled", "timeout", "unserved")

Came = list[tuple[float, int, Delta]]


async def served(router: ClusterRouter, rounds: int = 1, prompt: tuple[int, ...] = PROMPT) -> Came:
    """All kinds at once: when each delta came, and of which."""
    asked = [RequestArgs(prompt, params, None, None) for params in KINDS * rounds]
    found: Came = []
    deltas: AsyncGenerator[tuple[int, Delta]]
    async with asyncio.timeout(PATIENCE_S), aclosing(router.astream_each(asked)) as deltas:
        async for number, delta in deltas:
            found.append((time.monotonic(), number, delta))
    return found


def assert_same(found: Came, expected: list[list[RequestOutput]]) -> None:
    told: dict[tuple[int, int], list[int]] = {}
    outputs: dict[tuple[int, int], RequestOutput] = {}
    for _, number, delta in found:
        told.setdefault((number, delta.index), []).extend(delta.token_ids)
        if delta.output is not None:
            assert (number, delta.index) not in outputs, "it ends once"
            outputs[number, delta.index] = delta.output
    assert set(outputs) == set(told)
    for (number, sample), output in outputs.items():
        whole = expected[number % len(KINDS)][sample]
        assert (output.token_ids, output.text) == (whole.token_ids, whole.text)
        assert output.finish_reason == whole.finish_reason
        assert told[number, sample] == whole.token_ids, "nothing twice, nothing missing"
        assert len(output.logprobs or []) == len(whole.logprobs or [])


def lost(found: Came) -> int:
    """Streams that failed, or were told other tokens than they ended with."""
    told: dict[tuple[int, int], list[int]] = {}
    ends: dict[tuple[int, int], RequestOutput] = {}
    for _, number, delta in found:
        told.setdefault((number, delta.index), []).extend(delta.token_ids)
        if delta.output is not None:
            ends[number, delta.index] = delta.output
    failed = [one for one in ends.values() if one.finish_reason in _FAILED]
    other = [key for key, one in ends.items() if told[key] != one.token_ids]
    return len(failed) + len(other) + len(set(told) - set(ends))


def divergences(found: Came, expected: list[list[RequestOutput]]) -> tuple[int, int]:
    """Tokens up to where each text first differs, and how many texts do."""
    tokens = differ = 0
    for _, number, delta in found:
        if delta.output is None:
            continue
        whole, own = expected[number % len(KINDS)][delta.index].token_ids, delta.output.token_ids
        pairs = zip(own, whole, strict=False)
        tokens += next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(own), len(whole)))
        differ += own != whole
    return tokens, differ
