"""Streams of all kinds at once, and whether they are what one engine gives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from specrouter import (
    SLO,
    ChainRouter,
    RequestOutput,
    RouterConfig,
    SamplingParams,
    TokenLogprobs,
)
from specrouter.cluster.router import ClusterRouter
from specrouter.engine.request import Request
from specrouter.engine.serving import streamed
from specrouter.request.output import Delta
from specrouter.request.structure import Structure

PROMPT = (5, 17, 300, 42, 9)
LONG_PROMPT = tuple(5 + 7 * at % 300 for at in range(75))  # three chunks of 32
PATIENCE_S = 120.0


def _json(items: int) -> Structure:
    source = {"type": "array", "items": {"type": "integer"}, "maxItems": items}
    return Structure("json_schema", source)


# What a text can depend on, beside the target: each of them has to go on where it was cut.
KINDS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(max_new_tokens=20, ignore_eos=True),
    "sampled": SamplingParams(max_new_tokens=16, temperature=0.9, seed=3, top_p=0.95),
    "penalties": SamplingParams(
        max_new_tokens=16,
        temperature=0.7,
        seed=5,
        presence_penalty=0.8,
        frequency_penalty=0.4,
        repetition_penalty=1.2,
        min_tokens=6,
        logit_bias={7: 2.0},
    ),
    "structure": SamplingParams(max_new_tokens=24, temperature=1.0, seed=8, structure=_json(4)),
    "samples": SamplingParams(max_new_tokens=10, temperature=1.0, seed=9, n=2, ignore_eos=True),
    "logprobs": SamplingParams(max_new_tokens=10, temperature=0.5, seed=4, logprobs=2,
                               prompt_logprobs=1),
    "bad words": SamplingParams(max_new_tokens=12, temperature=1.0, seed=6,
                                bad_words_ids=((42, 9), (17,)), min_p=0.01),
}  # fmt: skip
# For processes, where seconds pass before a loss is known.
LONG_KINDS: dict[str, SamplingParams] = {
    "long": SamplingParams(max_new_tokens=120, ignore_eos=True),
    "sampled": SamplingParams(max_new_tokens=120, temperature=0.9, seed=3, ignore_eos=True),
    "penalty": SamplingParams(
        max_new_tokens=90, temperature=0.7, seed=5, presence_penalty=0.8, logprobs=1
    ),
    "structure": SamplingParams(max_new_tokens=60, temperature=1.0, seed=8, structure=_json(9)),
    "samples": SamplingParams(max_new_tokens=100, temperature=1.0, seed=9, n=2, ignore_eos=True),
}

Came = list[tuple[float, int, Delta]]


@dataclass(frozen=True)
class Load:
    """Requests of all kinds for a prompt, and the outputs of one engine, undisturbed."""

    prompt: tuple[int, ...]
    kinds: dict[str, SamplingParams]
    outputs: dict[str, list[RequestOutput]]

    @classmethod
    def of(
        cls,
        config: dict[str, Any] | RouterConfig,
        prompt: tuple[int, ...] = PROMPT,
        kinds: dict[str, SamplingParams] = KINDS,
    ) -> Load:
        """With a text to stop at that lies in the middle of the greedy one, if there is one: from
        its first token on, text is held back that might be the stop's beginning."""
        with ChainRouter.from_config(config) as router:
            found = {name: router.generate([list(prompt)], each) for name, each in kinds.items()}
            if "greedy" in found:
                text = found["greedy"][0].text
                stop = SamplingParams(
                    max_new_tokens=20, ignore_eos=True, stop=(text[:1] + "\0", text[-9:-5])
                )
                kinds = {**kinds, "stop": stop}
                found["stop"] = router.generate([list(prompt)], stop)
        return cls(prompt, kinds, found)

    def asked(self, params: SamplingParams, slo: SLO | None) -> Request:
        return Request(prompt=self.prompt, params=params, speculation=None, slo=slo)

    async def served(self, router: ClusterRouter, rounds: int = 1) -> Came:
        """All kinds at once."""
        return await served(
            router, [self.asked(each, None) for each in self.kinds.values()] * rounds
        )

    def check(self, router: ClusterRouter) -> None:
        self.assert_same(asyncio.run(self.served(router)))

    def check_restart(self, router: ClusterRouter) -> None:
        """Load after load, until all replicas are new."""

        async def both() -> list[Came]:
            restarting = asyncio.ensure_future(asyncio.to_thread(router.restart_replicas))
            rounds: list[Came] = []
            while not restarting.done() or not rounds:
                rounds.append(await self.served(router))
            await restarting
            return rounds

        for found in asyncio.run(both()):
            self.assert_same(found)

    def assert_same(self, found: Came) -> None:
        """Nothing comes twice, nothing is missing, and each ends once."""
        streams = collected(found)
        kinds, numbers = list(self.outputs), {number for number, _ in streams}
        assert set(streams) == {
            (number, one.index)
            for number in range(len(numbers))
            for one in self.outputs[kinds[number % len(kinds)]]
        }
        for (number, sample), deltas in streams.items():
            kind = kinds[number % len(kinds)]
            whole, output = self.outputs[kind][sample], deltas[-1].output
            assert output is not None, kind
            assert [one.finish_reason for one in deltas[:-1]] == [None] * (len(deltas) - 1)
            assert output.token_ids == whole.token_ids, kind
            assert (output.text, output.finish_reason) == (whole.text, whole.finish_reason), kind
            assert output.stop_reason == whole.stop_reason
            assert [token for one in deltas for token in one.token_ids] == whole.token_ids, kind
            assert "".join(one.text for one in deltas) == whole.text, kind
            _assert_close(output.logprobs, whole.logprobs)
            _assert_close(output.prompt_logprobs, whole.prompt_logprobs)

    def divergences(self, found: Came) -> tuple[int, int]:
        """Tokens up to where each text first differs, and how many texts do."""
        tokens = differ = 0
        whole = list(self.outputs.values())
        for (number, sample), deltas in collected(found).items():
            if (output := deltas[-1].output) is not None:
                own, other = output.token_ids, whole[number % len(whole)][sample].token_ids
                places = (at for at, (a, b) in enumerate(zip(own, other, strict=False)) if a != b)
                tokens += next(places, min(len(own), len(other)))
                differ += own != other
        return tokens, differ


def lost(found: Came) -> int:
    """Streams that failed, or were told other tokens than they ended with."""

    def is_whole(deltas: Sequence[Delta]) -> bool:
        output = deltas[-1].output
        if output is None or output.finish_reason not in ("eos", "stop", "length"):
            return False
        return output.token_ids == [token for one in deltas for token in one.token_ids]

    return sum(not is_whole(deltas) for deltas in collected(found).values())


def wait_until(condition: Callable[[], bool]) -> None:
    """As long as processes take."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.02)


async def served(router: ClusterRouter, asked: Sequence[Request]) -> Came:
    """When each delta came, and of which request."""
    found: Came = []
    async with asyncio.timeout(PATIENCE_S), streamed(router, asked) as deltas:
        async for number, delta in deltas:
            found.append((time.monotonic(), number, delta))
    return found


def output_of(router: ClusterRouter, asked: Request) -> RequestOutput:
    """Of a request alone."""
    [deltas] = collected(asyncio.run(served(router, [asked]))).values()
    output = deltas[-1].output
    assert output is not None
    assert [token for one in deltas for token in one.token_ids] == output.token_ids
    return output


def collected(found: Came) -> dict[tuple[int, int], list[Delta]]:
    """By request and sample, each in its order."""
    streams: dict[tuple[int, int], list[Delta]] = {}
    for _, number, delta in found:
        streams.setdefault((number, delta.index), []).append(delta)
    return streams


def _assert_close(found: list[Any] | None, expected: list[Any] | None) -> None:
    assert (found is None) == (expected is None)
    for one, other in zip(found or [], expected or [], strict=True):
        if isinstance(other, TokenLogprobs):
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
        else:
            assert one is other
