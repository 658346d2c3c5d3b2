"""The HTTP service: `/generate` (whole or as server-sent events), `/health`, `/v1/models`, and what
the router decided and did (`/router/` `decisions`, `statistics`, `calibration`, `slo`).

Contract: a request is checked before anything is queued, and a bad one gets a 4xx that names the
field. A client that leaves, in mid-stream or while it waits, cancels its request at once. Starting
and stopping the router is the caller's business.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from specrouter import ChainRouter, Delta, RequestError, RequestOutput, TokenLogprobs
from specrouter.generate_request import GenerateRequest, SloRequest, SpeculationRequest

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_CLIENT_CLOSED_REQUEST = 499  # nginx's number; nobody is left to read it
_LEAST_LOGPROB = -9999.0  # JSON has no infinity; this is what vLLM's clients know
_FIELDS = frozenset().union(
    *(model.model_fields for model in (GenerateRequest, SpeculationRequest, SloRequest))
)


def create_app(router: ChainRouter) -> FastAPI:
    """The service in front of `router`, which must stay open as long as the app runs."""
    app = FastAPI(title="SpecRouter", summary="Routed speculative decoding")
    _add_error_handlers(app)
    created = int(time.time())
    token_text = _token_texts(router)

    @app.post("/generate")
    async def generate(body: GenerateRequest, request: Request) -> Response:
        prompt, params = body.source(), body.sampling_params()
        slo = body.objective(request.headers, router.slo_classes)
        deltas = router.astream(prompt, params, body.speculation_override(), slo)
        answers = _Answers(token_text, numbered=params.n > 1)
        if body.stream:
            return await _streamed(request, deltas, answers)
        return await _whole(request, deltas, answers)

    @app.get("/health")
    async def health() -> Response:
        if not router.is_healthy:
            return _error_response(503, "the engine has stopped", code="engine_stopped")
        return JSONResponse({"status": "ok"})

    @app.get("/v1/models")
    async def models() -> Response:
        target = router.pool.target
        model = {"id": target, "object": "model", "created": created}
        return JSONResponse(
            {"object": "list", "data": [{**model, "owned_by": "specrouter", "root": target}]}
        )

    @app.get("/router/decisions")
    async def decisions() -> Response:
        return JSONResponse({"decisions": [record.to_json() for record in router.decisions()]})

    @app.get("/router/statistics")
    async def statistics() -> Response:
        return JSONResponse(asdict(router.statistics()))

    @app.get("/router/calibration")
    async def calibration() -> Response:
        return JSONResponse({"calibration": _calibration(router)})

    @app.get("/router/slo")
    async def slo_report() -> Response:
        return JSONResponse(asdict(router.slo_report()))

    return app


def _calibration(router: ChainRouter) -> list[dict[str, Any]]:
    return [
        {
            "proposers": list(proposers),
            "inner_rounds": rounds,
            "verifier": verifier,
            "sampled": sampled,
            **asdict(figures),
        }
        for (proposers, rounds, verifier, sampled), figures in router.calibration().items()
    ]


def _token_texts(router: ChainRouter) -> Callable[[int], str]:
    """The text of a single id. There are no more of them than the vocabulary has."""

    @functools.cache
    def token_text(token: int) -> str:
        text = router.pool.tokenizer.decode([token], clean_up_tokenization_spaces=False)
        assert isinstance(text, str)  # a list only for several sequences
        return text

    return token_text


@dataclass(frozen=True)
class _Answers:
    """How outputs and deltas look in JSON; `numbered` where a prompt has several samples."""

    token_text: Callable[[int], str]
    numbered: bool

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        if not self.numbered:
            return {**self._content(outputs[0]), **_ending(outputs[0])}
        choices = [
            {**self._content(output), **_ending(output)}
            for output in sorted(outputs, key=lambda output: output.index)
        ]
        seeds = [choice.pop("seed") for choice in choices]
        return {"choices": choices, "seed": seeds[0]}

    def event(self, delta: Delta) -> dict[str, Any]:
        if delta.output is None:
            return self._content(delta)
        if delta.output.finish_reason == "error":
            return {**self._number(delta), **_generation_error(delta.output.error)}
        return {**self._content(delta), **_ending(delta.output)}

    def _content(self, part: Delta | RequestOutput) -> dict[str, Any]:
        content = {**self._number(part), "text": part.text, "token_ids": list(part.token_ids)}
        if part.logprobs is not None:
            content["logprobs"] = [self._position(position) for position in part.logprobs]
        return content

    def _number(self, part: Delta | RequestOutput) -> dict[str, Any]:
        return {"index": part.index} if self.numbered else {}

    def _position(self, position: TokenLogprobs) -> dict[str, Any]:
        top = [self._candidate(token, logprob) for token, logprob in position.top]
        return {**self._candidate(position.token_id, position.logprob), "top": top}

    def _candidate(self, token: int, logprob: float) -> dict[str, Any]:
        finite = max(logprob, _LEAST_LOGPROB) if math.isfinite(logprob) else _LEAST_LOGPROB
        return {"token_id": token, "token": self.token_text(token), "logprob": finite}


async def _whole(request: Request, deltas: AsyncGenerator[Delta], answers: _Answers) -> Response:
    async with aclosing(deltas):
        outputs = await _unless_client_leaves(request, _outputs(deltas))
    if outputs is None:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    answer = answers.whole(outputs)
    failed = next((output for output in outputs if output.finish_reason == "error"), None)
    if failed is None:
        return JSONResponse(answer)
    return JSONResponse({**answer, **_generation_error(failed.error)}, status_code=500)


async def _streamed(request: Request, deltas: AsyncGenerator[Delta], answers: _Answers) -> Response:
    """Waits for the first tokens, so that a refusal can still be a status code."""
    first = await _unless_client_leaves(request, anext(deltas))
    if first is None:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    return _EventStream(first, deltas, answers)


class _EventStream(StreamingResponse):
    """One event per committed run of tokens of a sample, then `[DONE]`.

    Closes `deltas` however the response ends: that is what cancels the request of a client that
    left. (Starlette alone leaves it to the garbage collector.)
    """

    def __init__(self, first: Delta, deltas: AsyncGenerator[Delta], answers: _Answers) -> None:
        self._deltas = deltas
        self._events = _events(first, deltas, answers)
        super().__init__(
            self._events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._deltas), aclosing(self._events):
            await super().__call__(scope, receive, send)


async def _events(
    first: Delta, rest: AsyncGenerator[Delta], answers: _Answers
) -> AsyncGenerator[bytes]:
    try:
        yield _event(answers.event(first))
        async for delta in rest:
            yield _event(answers.event(delta))
    except Exception as error:
        # The status line is out; only an event can still tell the client.
        logger.exception("a stream failed")
        yield _event(_generation_error(str(error)))
    yield b"data: [DONE]\n\n"


def _event(payload: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(payload, ensure_ascii=False)}\n\n".encode()


def _ending(output: RequestOutput) -> dict[str, Any]:
    return {
        "finish_reason": output.finish_reason,
        "metrics": output.metrics.to_json(),
        "seed": output.seed,
    }


async def _outputs(deltas: AsyncGenerator[Delta]) -> list[RequestOutput]:
    outputs = [delta.output async for delta in deltas if delta.output is not None]
    if not outputs:
        raise RuntimeError("the request ended without an output")
    return outputs


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


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid_body(_: Request, error: RequestValidationError) -> Response:
        return _invalid_body_response(error.errors())

    @app.exception_handler(RequestError)
    async def refused(_: Request, error: RequestError) -> Response:
        return _error_response(400, str(error), param=error.field, code="invalid_value")

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        return _error_response(error.status_code, error.detail)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        # Starlette raises it again after this answer, so the server logs the traceback.
        return _error_response(500, f"internal error: {type(error).__name__}", code="internal")


def _invalid_body_response(errors: Sequence[dict[str, Any]]) -> Response:
    """400 that names the first bad field.

    A union reports each branch that did not fit: the one that got furthest knows best, and
    branches that got equally far are joined ("a valid string, or a valid list").
    """
    if errors[0]["type"] == "json_invalid":
        position = f"{errors[0]['ctx']['error']} at character {errors[0]['loc'][-1]}"
        return _error_response(400, f"malformed JSON: {position}", code="invalid_json")
    paths = [_field_path(error) for error in errors]
    if not paths[0]:
        message = "the body must be a JSON object, sent with Content-Type: application/json"
        return _error_response(400, message, code="invalid_value")
    path = max((path for path in paths if path[0] == paths[0][0]), key=len)
    reasons = [error["msg"] for error, other in zip(errors, paths, strict=True) if other == path]
    param = path[0] + "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in path[1:]
    )
    message = f"{param}: {', or '.join(dict.fromkeys(reasons))}"
    return _error_response(400, message, param=param, code="invalid_value")


def _field_path(error: dict[str, Any]) -> tuple[Any, ...]:
    """Pydantic's location without the "body" in front and the names of union branches."""
    location = error["loc"][1:]
    names = _FIELDS | {location[-1]} if error["type"] == "extra_forbidden" else _FIELDS
    return tuple(part for part in location if isinstance(part, int) or part in names)


def _error_payload(
    status: int, message: str, param: str | None, code: str | None
) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _error_response(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> Response:
    return JSONResponse(_error_payload(status, message, param, code), status_code=status)


def _generation_error(reason: str | None) -> dict[str, Any]:
    return _error_payload(500, reason or "generation failed", None, "generation_failed")
