"""Requests from a client's point of view: what one of them came to, and many of them at a rate.

Contract: every request ends in one outcome. "complete": exactly one finish reason for each choice,
then `[DONE]` and nothing more, or one JSON body. "refused": a 503 with `Retry-After`. "left": the
client went away on purpose. "gone": nobody answered, not even in part. Anything else is "broken",
with the reason.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

Kind = Literal["complete", "refused", "left", "gone", "broken"]
_PATIENCE_S = 300.0


@dataclass(frozen=True)
class Outcome:
    """`texts` are those of the choices, by index."""

    kind: Kind
    reason: str = ""
    texts: tuple[str, ...] = ()
    tokens: int = 0


@dataclass(frozen=True)
class Asked:
    """A completion; the client leaves after so many chunks, or seconds if it does not stream."""

    body: dict[str, Any]
    leaves_after: float | None = None


def new_client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(base_url=url, timeout=_PATIENCE_S, limits=limits)


async def ask(client: httpx.AsyncClient, asked: Asked) -> Outcome:
    leaves_s = None if asked.body.get("stream") else asked.leaves_after
    try:
        async with asyncio.timeout(leaves_s):
            return await _ask(client, asked)
    except TimeoutError:
        return Outcome("left")
    except (httpx.HTTPError, ValueError, KeyError) as error:
        return Outcome("broken", repr(error))


async def _ask(client: httpx.AsyncClient, asked: Asked) -> Outcome:
    request = client.build_request("POST", "/v1/completions", json=asked.body)
    try:
        answer = await client.send(request, stream=True)
    except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
        return Outcome("gone", repr(error))
    async with aclosing(answer):
        if answer.status_code == 200 and asked.body.get("stream"):
            return await _streamed(answer, asked)
        await answer.aread()
        return _whole(answer) if answer.status_code == 200 else _refusal(answer)


def _whole(answer: httpx.Response) -> Outcome:
    choices = answer.json()["choices"]
    if any(choice["finish_reason"] not in ("stop", "length") for choice in choices):
        return Outcome("broken", f"finish reasons of {choices}"[:300])
    tokens = answer.json()["usage"]["completion_tokens"]
    return Outcome("complete", "", tuple(choice["text"] for choice in choices), tokens)


async def _streamed(answer: httpx.Response, asked: Asked) -> Outcome:
    reading = Reading(choices=asked.body.get("n", 1))
    async for event in _events(answer):
        reading.take(event)
        if asked.leaves_after is not None and reading.chunks >= asked.leaves_after:
            return Outcome("left")
    return reading.outcome()


@dataclass(kw_only=True)
class Reading:
    """A stream as far as it was read."""

    choices: int
    chunks: int = 0
    tokens: int = 0
    is_done: bool = False
    faults: list[str] = field(default_factory=list)
    ends: Counter[int] = field(default_factory=Counter)
    texts: dict[int, str] = field(default_factory=dict)

    def take(self, event: str) -> None:
        if self.is_done:
            self.faults.append(f"after [DONE]: {event[:200]}")
        elif event == "[DONE]":
            self.is_done = True
        else:
            self._take_chunk(json.loads(event))

    def _take_chunk(self, chunk: dict[str, Any]) -> None:
        self.chunks += 1
        if "error" in chunk:
            self.faults.append(f"an error: {chunk['error']}")
            return
        for choice in chunk["choices"]:
            index = choice["index"]
            if self.ends[index]:
                self.faults.append(f"choice {index} goes on after its end")
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            self.ends[index] += choice["finish_reason"] is not None
        self.tokens = (chunk.get("usage") or {}).get("completion_tokens", self.tokens)

    def outcome(self) -> Outcome:
        if not self.is_done:
            self.faults.append("no [DONE]")
        if self.ends != Counter(range(self.choices)):
            self.faults.append(f"finish reasons by choice: {dict(self.ends)}")
        if self.faults:
            return Outcome("broken", "; ".join(self.faults))
        texts = tuple(self.texts[index] for index in range(self.choices))
        return Outcome("complete", "", texts, self.tokens)


async def _events(answer: httpx.Response) -> AsyncIterator[str]:
    async for line in answer.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")
        elif line:
            raise ValueError(f"not an event: {line[:200]}")


def _refusal(answer: httpx.Response) -> Outcome:
    wait = answer.headers.get("retry-after", "")
    if answer.status_code == 503 and wait.isdigit() and int(wait) >= 1:
        return Outcome("refused", answer.json()["error"]["code"])
    return Outcome("broken", f"{answer.status_code}, Retry-After {wait!r}: {answer.text[:200]}")


async def open_loop(
    client: httpx.AsyncClient,
    requests: Iterator[Asked],
    rate: float,
    seconds: float,
    progress: Callable[[Counter[str]], None],
) -> list[Outcome]:
    """Sends `rate` requests a second, whatever becomes of them, and waits for all in the end."""
    began_s, shown_s, sent = time.monotonic(), 0.0, 0
    counts: Counter[str] = Counter()
    tasks: list[asyncio.Task[Outcome]] = []

    async def one(asked: Asked) -> Outcome:
        outcome = await ask(client, asked)
        counts[outcome.kind] += 1
        return outcome

    while (now_s := time.monotonic() - began_s) < seconds:
        while sent < now_s * rate:
            tasks.append(asyncio.create_task(one(next(requests))))
            sent += 1
        if now_s - shown_s >= 10:
            shown_s = now_s
            progress(counts)
        await asyncio.sleep(0.005)
    return list(await asyncio.gather(*tasks))


async def closed_loop(
    client: httpx.AsyncClient, requests: Iterator[Asked], clients: int, seconds: float
) -> list[Outcome]:
    """So many clients, each of which asks again as soon as it is answered."""
    deadline = time.monotonic() + seconds
    outcomes: list[Outcome] = []

    async def one() -> None:
        while time.monotonic() < deadline:
            outcomes.append(await ask(client, next(requests)))

    await asyncio.gather(*(one() for _ in range(clients)))
    return outcomes


def counted(outcomes: list[Outcome]) -> Counter[str]:
    return Counter(outcome.kind for outcome in outcomes)


def broken(outcomes: list[Outcome]) -> list[str]:
    return [outcome.reason for outcome in outcomes if outcome.kind == "broken"]
