"""Delivery of an answer: whole or as server-sent events, and cancelled if the client leaves.

Contract: a client that leaves, in mid-stream or while it waits, cancels its request at once. A
refusal is a status code, and so is a failure of all texts before their first tokens, since nothing
is sent before; a later failure is an event `{"error": ...}`. Every stream ends with `[DONE]`. What
takes long, log-probabilities or drafts of many tokens, is made in a thread.
"""

from __future__ import annotations

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from specrouter.http.answers import error_payload
from specrouter.http.errors import Failure, failure_of
from specrouter.request.delta_stream import DeltaStream
from specrouter.request.output import Delta, RequestOutput

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_CLIENT_CLOSED_REQUEST = 499  # nginx's number; no client is left to read it
_DONE = b"data: [DONE]\n\n"
_SLICE = 64  # entries of a list that are encoded at once
# JSON may hold them unescaped, but httpx takes them for the end of a line.
_LINE_ENDS = tuple((end.encode(), f"\\u{ord(end):04x}".encode()) for end in "\x85\u2028\u2029")

Outputs = Sequence[tuple[int, RequestOutput]]


class Answer(ABC):
    """JSON of one request's outputs, as plain dicts since a chunk is made for every delta.

    `structure_field`: the client's name of the field at fault if a structure fails.
    """

    structure_field = "structure"

    @abstractmethod
    def whole(self, outputs: Outputs) -> dict[str, Any]:
        """Return the answer for all outputs, none of which failed; by prompt, then by sample."""

    @abstractmethod
    def chunk(self, prompt: int, delta: Delta) -> dict[str, Any] | None:
        """Return a chunk, or None if there is nothing to send yet; called in the deltas' order."""

    def last_chunk(self) -> dict[str, Any] | None:
        """Return the chunk after all others, or None."""
        return None

    def partial(self, outputs: Outputs) -> dict[str, Any]:
        """Return further keys of the error if one of the outputs failed."""
        return {}

    def place(self, delta: Delta) -> dict[str, Any]:
        """Return further keys of the error of a text that failed in mid-stream."""
        return {}


async def respond(request: Request, deltas: DeltaStream, answer: Answer, stream: bool) -> Response:
    if stream:
        return await _streamed(request, deltas, answer)
    return await _whole(request, deltas, answer)


async def _whole(request: Request, deltas: DeltaStream, answer: Answer) -> Response:
    async with aclosing(deltas):
        outputs = await _unless_client_leaves(request, _outputs(deltas))
    if outputs is None:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    return await _answer_of(outputs, answer)


async def _answer_of(outputs: Outputs, answer: Answer) -> Response:
    if any(one.logprobs or one.prompt_logprobs or one.drafts for _, one in outputs):
        # It may take seconds, in which the event loop would serve no stream.
        return await asyncio.to_thread(_answered, outputs, answer)
    return _answered(outputs, answer)


def _answered(outputs: Outputs, answer: Answer) -> Response:
    for _, output in outputs:
        failure = failure_of(output, answer.structure_field)
        if failure is not None:
            content = {**answer.partial(outputs), **failure.payload()}
            return PartsResponse(content, status_code=failure.status, headers=failure.headers)
    return PartsResponse(answer.whole(outputs))


class PartsResponse(JSONResponse):
    """Response that may be long: made in a thread, in parts so that other threads run."""

    def render(self, content: Any) -> bytes:
        return _in_parts(content)


async def _streamed(request: Request, deltas: DeltaStream, answer: Answer) -> Response:
    """Wait for the first tokens, so that a refusal or a failure can still be a status code."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(aclosing(deltas))
        begun = await _unless_client_leaves(request, _beginning(deltas))
        if begun is None:
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        if all(_failure(delta) for _, delta in begun):
            return await _answer_of(_ordered(begun), answer)
        stack.pop_all()  # the response closes the deltas
        return ClosedStream(_events(begun, deltas, answer), deltas)


async def _beginning(deltas: DeltaStream) -> Sequence[tuple[int, Delta]]:
    """Return the deltas up to the first that is no failure: if one text fails, others go on."""
    begun = []
    async for at, delta in deltas:
        begun.append((at, delta))
        if _failure(delta) is None:
            break
    return begun


class ClosedStream(StreamingResponse):
    """Server-sent events that are closed, with their source, however the response ends.

    This cancels the request of a client that left; Starlette leaves it to the garbage collector.
    """

    def __init__(self, events: AsyncGenerator[bytes], source: DeltaStream | None = None) -> None:
        self._source, self._events = source, events
        headers = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
        super().__init__(events, media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as stack:
            if self._source is not None:
                await stack.enter_async_context(aclosing(self._source))
            await stack.enter_async_context(aclosing(self._events))
            await super().__call__(scope, receive, send)


async def _events(
    begun: Sequence[tuple[int, Delta]], rest: DeltaStream, answer: Answer
) -> AsyncGenerator[bytes]:
    try:
        for one in begun:
            yield await _event_of(answer, *one)
        async for one in rest:
            yield await _event_of(answer, *one)
        last = answer.last_chunk()
        if last is not None:
            yield _event(last)
    except Exception as error:
        # The status line has been sent; only an event can report the error.
        logger.exception("a stream failed")
        yield _event(error_payload(500, str(error), code="generation_failed"))
    yield _DONE


async def _event_of(answer: Answer, prompt: int, delta: Delta) -> bytes:
    """Return the event of a delta; empty if there is nothing to send yet."""
    if delta.prompt_logprobs:  # as in `_answer_of`
        return await asyncio.to_thread(_event_now, answer, prompt, delta)
    return _event_now(answer, prompt, delta)


def _event_now(answer: Answer, prompt: int, delta: Delta) -> bytes:
    failure = _failure(delta, answer.structure_field)
    if failure is not None:
        return _event({**answer.place(delta), **failure.payload()})
    chunk = answer.chunk(prompt, delta)
    if chunk is None:
        return b""
    return framed(_in_parts(chunk)) if delta.prompt_logprobs else _event(chunk)


def _failure(delta: Delta, structure_field: str = "") -> Failure | None:
    return None if delta.output is None else failure_of(delta.output, structure_field)


def _event(payload: dict[str, Any]) -> bytes:
    return framed(json.dumps(payload, ensure_ascii=False).encode())


def framed(data: bytes) -> bytes:
    for end, escaped in _LINE_ENDS:
        data = data.replace(end, escaped)
    return b"data: " + data + b"\n\n"


def _in_parts(value: Any, name: str = "") -> bytes:
    """Encode JSON, long lists in slices: `json` blocks other threads while it encodes a value.

    Only the items of `choices` contain long lists themselves, and are encoded one by one.
    """
    if isinstance(value, dict):
        members = (encoded(key) + b":" + _in_parts(one, key) for key, one in value.items())
        return b"{" + b",".join(members) + b"}"
    if not isinstance(value, list):
        return encoded(value)
    if name == "choices":
        return b"[" + b",".join(map(_in_parts, value)) + b"]"
    slices = (value[at : at + _SLICE] for at in range(0, len(value), _SLICE))
    return b"[" + b",".join(encoded(part)[1:-1] for part in slices) + b"]"


def encoded(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()


async def _outputs(deltas: DeltaStream) -> Outputs:
    return _ordered([(at, delta) async for at, delta in deltas if delta.output is not None])


def _ordered(deltas: Sequence[tuple[int, Delta]]) -> Outputs:
    """Return the outputs by prompt, then by sample."""
    outputs = [(at, delta.output) for at, delta in deltas if delta.output is not None]
    if not outputs:
        raise RuntimeError("the request ended without an output")
    return sorted(outputs, key=lambda one: (one[0], one[1].index))


async def _unless_client_leaves(request: Request, work: Awaitable[_Result]) -> _Result | None:
    """Return the result of `work`, or None if the client left first; `work` is cancelled then."""
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
