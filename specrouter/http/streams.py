"""An answer's way to the client: whole, or as server-sent events, and what happens if it leaves.

Contract: a client that leaves, in mid-stream or while it waits, cancels its request at once. A
refusal is a status code, since nothing is sent before the first tokens are there; what fails later
is an event `{"error": ...}`. A stream ends in `[DONE]`, however it went.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from specrouter import Delta, RequestOutput
from specrouter.http.errors import error_payload, failure_of

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_CLIENT_CLOSED_REQUEST = 499  # nginx's number; nobody is left to read it
_DONE = b"data: [DONE]\n\n"

Deltas = AsyncGenerator[tuple[int, Delta]]  # each with its prompt's number
Outputs = Sequence[tuple[int, RequestOutput]]


class Answer(Protocol):
    """How one request's outputs look in JSON. Plain dicts: a chunk is made for every delta."""

    def whole(self, outputs: Outputs) -> dict[str, Any]:
        """All outputs, none of which failed; by prompt, then by sample."""

    def chunk(self, prompt: int, delta: Delta) -> dict[str, Any] | None:
        """None where there is nothing to say yet. In the order in which deltas come."""

    def last_chunk(self) -> dict[str, Any] | None:
        """After all others."""

    def partial(self, outputs: Outputs) -> dict[str, Any]:
        """What stands beside the error where one of the outputs failed."""

    def place(self, delta: Delta) -> dict[str, Any]:
        """What stands beside the error of one that failed in mid-stream."""


async def respond(request: Request, deltas: Deltas, answer: Answer, stream: bool) -> Response:
    """Raises what the router refuses the request with."""
    if stream:
        return await _streamed(request, deltas, answer)
    return await _whole(request, deltas, answer)


async def _whole(request: Request, deltas: Deltas, answer: Answer) -> Response:
    async with aclosing(deltas):
        outputs = await _unless_client_leaves(request, _outputs(deltas))
    if outputs is None:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    if any(output.logprobs or output.prompt_logprobs for _, output in outputs):
        # Maybe seconds of work, for which streams would stand still.
        return await asyncio.to_thread(_answered, outputs, answer)
    return _answered(outputs, answer)


def _answered(outputs: Outputs, answer: Answer) -> Response:
    for _, output in outputs:
        failure = failure_of(output)
        if failure is not None:
            content = {**answer.partial(outputs), **failure.payload()}
            return _PartsResponse(content, status_code=failure.status, headers=failure.headers)
    return _PartsResponse(answer.whole(outputs))


class _PartsResponse(JSONResponse):
    """Of an object. What its lists hold is encoded one by one: json lets no other thread run while
    it encodes a value, however large.
    """

    def render(self, content: dict[str, Any]) -> bytes:
        members = (_encoded(key) + b":" + self._value(value) for key, value in content.items())
        return b"{" + b",".join(members) + b"}"

    def _value(self, value: Any) -> bytes:
        if isinstance(value, list):
            return b"[" + b",".join(map(_encoded, value)) + b"]"
        return _encoded(value)


async def _streamed(request: Request, deltas: Deltas, answer: Answer) -> Response:
    """Waits for the first tokens, so that a refusal can still be a status code."""
    first = await _unless_client_leaves(request, anext(deltas))
    if first is None:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    return _EventStream(first, deltas, answer)


class _EventStream(StreamingResponse):
    """Closes `deltas` however the response ends: that is what cancels the request of a client that
    left. (Starlette alone leaves it to the garbage collector.)
    """

    def __init__(self, first: tuple[int, Delta], deltas: Deltas, answer: Answer) -> None:
        self._deltas = deltas
        self._events = _events(first, deltas, answer)
        super().__init__(
            self._events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._deltas), aclosing(self._events):
            await super().__call__(scope, receive, send)


async def _events(first: tuple[int, Delta], rest: Deltas, answer: Answer) -> AsyncGenerator[bytes]:
    try:
        chunk = _chunk(answer, *first)
        if chunk is not None:
            yield _event(chunk)
        async for prompt, delta in rest:
            chunk = _chunk(answer, prompt, delta)
            if chunk is not None:
                yield _event(chunk)
        chunk = answer.last_chunk()
        if chunk is not None:
            yield _event(chunk)
    except Exception as error:
        # The status line is out; only an event can still tell the client.
        logger.exception("a stream failed")
        yield _event(error_payload(500, str(error), code="generation_failed"))
    yield _DONE


def _chunk(answer: Answer, prompt: int, delta: Delta) -> dict[str, Any] | None:
    failure = None if delta.output is None else failure_of(delta.output)
    if failure is not None:
        return {**answer.place(delta), **failure.payload()}
    return answer.chunk(prompt, delta)


def _encoded(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()


def _event(payload: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(payload, ensure_ascii=False)}\n\n".encode()


async def _outputs(deltas: Deltas) -> Outputs:
    outputs = [(at, delta.output) async for at, delta in deltas if delta.output is not None]
    if not outputs:
        raise RuntimeError("the request ended without an output")
    return sorted(outputs, key=lambda one: (one[0], one[1].index))


async def _unless_client_leaves(request: Request, work: Awaitable[_Result]) -> _Result | None:
    """The result of `work`, or None when the client left first; `work` is cancelled then."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
