"""Errors of the service: the status, code and field of each.

Contract: a client's mistake gets a 4xx that names the field as the client knows it, never a 500.
`param` is a path such as `messages[0].content`. A failure of the engine is a 500; a service that
takes no requests now answers 503, with `Retry-After` where waiting may help.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from specrouter.engine.context_limit import ContextLengthError
from specrouter.http.answers import error_payload, error_response
from specrouter.http.openai_fields import Prediction, StreamOptions
from specrouter.http.prometheus import Refusal, count_refusal
from specrouter.http.request_fields import GenerateRequest, SpeculationRequest
from specrouter.http.structure_fields import NamedSchema, ResponseFormat, StructuredOutputs
from specrouter.request.errors import (
    EngineDeadError,
    NoReplicaError,
    OverloadedError,
    UnavailableError,
)
from specrouter.request.output import Feasible, RequestOutput
from specrouter.request.params import RequestError
from specrouter.request.slo_fields import SloFields, StageFields

SHOULD_RETRY_HEADER = "x-should-retry"  # OpenAI's clients obey it
_LONGEST_PATH = 80  # characters of a path in a message

# Fields of the objects that refuse unknown ones, by the last name before an unknown field in
# pydantic's location: the class in a union, else the field that holds the object.
_KNOWN = {
    name: ", ".join(field.alias or own for own, field in body.model_fields.items())
    for name, body in (
        (SloFields.__name__, SloFields),
        (SpeculationRequest.__name__, SpeculationRequest),
        ("stages", StageFields),
        ("stream_options", StreamOptions),
        ("response_format", ResponseFormat),
        ("json_schema", NamedSchema),
        ("structured_outputs", StructuredOutputs),
        ("prediction", Prediction),
    )
}


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Reason why an accepted request has no answer.

    Attributes:
        param: the field at fault, if there is one.
        is_final: a retry does not help; OpenAI's clients would retry after 408 and 5xx.
        retry_after_s: when a retry may help, if that is known.
        details: further keys of the error.
    """

    status: int
    code: str
    message: str
    is_final: bool
    param: str | None = None
    retry_after_s: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        if self.is_final:
            return {SHOULD_RETRY_HEADER: "false"}
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(_retry_after(self.retry_after_s))}

    def payload(self) -> dict[str, Any]:
        return error_payload(self.status, self.message, self.param, self.code, self.details)


# By finish reason of a failed text: status, code, message and `is_final`.
_FAILURES: Mapping[str, tuple[int, str, str, bool]] = {
    "error": (500, "generation_failed", "generation failed", True),
    "timeout": (408, "timeout", "the request's time is up after {} tokens", True),
    "cancelled": (503, "shutting_down", "the service has stopped before the text was done", False),
}


def failure_of(output: RequestOutput, structure_field: str) -> Failure | None:
    """Return why a text failed, or None; `structure_field` is the client's name of `structure`."""
    reason, field = output.finish_reason, output.error_field
    if field == "unattainable":
        return _rejection(output)
    if reason == "error" and field is not None:
        field = structure_field if field == "structure" else field
        message = f"{field}: {output.error}"
        return Failure(
            status=400, code="invalid_value", message=message, is_final=True, param=field
        )
    if reason == "engine_dead":
        # Without tokens, it is like a request that came after the failure. With some, it may be the
        # cause of the failure: no client should retry it automatically.
        cause, is_final = output.error, bool(output.token_ids)
        message = f"the engine has failed: {cause}; send the request again once GET /health is 200"
        return Failure(status=503, code="engine_dead", message=message, is_final=is_final)
    if reason not in _FAILURES:
        return None
    status, code, usual, is_final = _FAILURES[reason]
    message = output.error or usual.format(len(output.token_ids))
    return Failure(status=status, code=code, message=message, is_final=is_final)


def _rejection(output: RequestOutput) -> Failure:
    """Return the failure of a rejected request.

    A retry helps if the first token would come too late: other requests end meanwhile.
    """
    objective, feasible = output.metrics.objective, output.feasible or Feasible()
    asked_ms = None if objective is None else objective.ttft_ms
    late_ms = 0.0
    if asked_ms is not None and feasible.ttft_ms is not None:
        late_ms = feasible.ttft_ms - asked_ms
    return Failure(
        status=503,
        code="slo_unattainable",
        message=f"slo: {output.error}",
        is_final=late_ms <= 0,
        param="slo",
        retry_after_s=late_ms / 1000,
        details={"feasible": asdict(feasible)},
    )


def _retry_after(delay_s: float) -> int:
    return max(1, math.ceil(delay_s))


class UnknownModelError(RequestError):
    """A request for a model that is not served."""


@contextmanager
def field_names(names: Callable[[], Mapping[str, str]]) -> Iterator[None]:
    """Rename the fields of a `RequestError` to the client's names, within the context.

    Args:
        names: returns the client's names by our own. Own names with an underscore are replaced in
            the reason too: they are no plain words.
    """
    try:
        yield
    except RequestError as error:
        reason, known = error.reason, names()
        for ours, theirs in known.items():
            if "_" in ours:
                reason = reason.replace(ours, theirs)
        name, bracket, number = error.field.partition("[")
        raise error.at(known.get(name, name) + bracket + number, reason) from error


# By error of a refused request: the kind of refusal that is counted, status, and code.
_REFUSALS: Mapping[type[Exception], tuple[Refusal, int, str]] = {
    RequestError: ("bad_request", 400, "invalid_value"),
    ContextLengthError: ("bad_request", 400, "context_length_exceeded"),
    UnknownModelError: ("bad_request", 404, "model_not_found"),
    UnavailableError: ("unavailable", 503, "engine_stopped"),
    EngineDeadError: ("unavailable", 503, "engine_dead"),
    NoReplicaError: ("unavailable", 503, "no_replica_ready"),
    OverloadedError: ("overloaded", 503, "overloaded"),
}


def add_error_handlers(app: FastAPI, fields: Collection[str]) -> None:
    """Add handlers of all errors; `fields` are the names of all fields of request bodies."""

    @app.exception_handler(RequestValidationError)
    async def invalid_body(request: Request, error: RequestValidationError) -> Response:
        count_refusal(request.app, "bad_request")
        return _invalid_body_response(error.errors(), fields)

    for kind, refusal in _REFUSALS.items():
        app.add_exception_handler(kind, partial(_refused, *refusal))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if error.status_code < 500:  # no such path or method, or a body that cannot be read
            count_refusal(request.app, "bad_request")
        asked = f"no {request.method} {request.url.path[:_LONGEST_PATH]} here"
        allowed = (error.headers or {}).get("Allow")
        message = error.detail
        if error.status_code == 404:
            at = "chats are at /v1/chat/completions, completions at /v1/completions"
            message = f"{asked}; {at}; see /docs"
        elif error.status_code == 405:
            message = f"{asked}; {f'it takes {allowed}; ' if allowed else ''}see /docs"
        return error_response(error.status_code, message, headers=error.headers)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        # Starlette raises it again after this answer, so the server logs the traceback.
        return error_response(500, f"internal error: {type(error).__name__}", code="internal")


async def _refused(
    counted: Refusal, status: int, code: str, request: Request, error: Exception
) -> Response:
    count_refusal(request.app, counted)
    field, delay_s = getattr(error, "field", None), getattr(error, "retry_after_s", None)
    headers = {} if delay_s is None else {"Retry-After": str(_retry_after(delay_s))}
    return error_response(status, str(error), param=field, code=code, headers=headers)


def _invalid_body_response(
    errors: Sequence[Mapping[str, Any]], fields: Collection[str]
) -> Response:
    """Return a 400 that names the first bad field.

    A union reports each branch that did not fit. The error with the longest path is shown, and
    reasons with the same path are joined ("a valid string, or a valid list").
    """
    if errors[0]["type"] == "json_invalid":
        position = f"{errors[0]['ctx']['error']} at character {errors[0]['loc'][-1]}"
        return error_response(400, f"malformed JSON: {position}", code="invalid_json")
    # Unknown keys first: a misspelt one is why a required one is missing.
    errors = sorted(errors, key=lambda error: bool(error["type"] != "extra_forbidden"))
    paths = [_field_path(error, fields) for error in errors]
    if not paths[0]:
        message = "the body must be a JSON object, sent with Content-Type: application/json"
        return error_response(400, message, code="invalid_value")
    path = max((path for path in paths if path[:1] == paths[0][:1]), key=len)
    reasons = [_reason(error) for error, other in zip(errors, paths, strict=True) if other == path]
    param = str(path[0]) + "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in path[1:]
    )
    message = f"{param}: {', or '.join(dict.fromkeys(reasons))}"
    return error_response(400, message, param=param, code="invalid_value")


def _reason(error: Mapping[str, Any]) -> str:
    message: str = error["msg"]
    if error["type"] != "extra_forbidden":
        return message
    *path, name = error["loc"]
    place = next((part for part in reversed(path) if isinstance(part, str)), "")
    if place in _KNOWN:
        return f"unknown; known are {_KNOWN[place]}"
    if name in SloFields.model_fields:
        return f'belongs in slo: {{"slo": {{"{name}": ...}}}}'
    near = difflib.get_close_matches(str(name)[:80], GenerateRequest.model_fields, 1)
    return f"unknown; did you mean {near[0]}?" if near else "unknown; see /docs"


def _field_path(error: Mapping[str, Any], fields: Collection[str]) -> tuple[Any, ...]:
    """Return pydantic's location without the leading "body" and names of union branches."""
    location = error["loc"][1:]
    unknown = location[-1:] if error["type"] == "extra_forbidden" else ()
    return tuple(
        part for part in location if isinstance(part, int) or part in fields or part in unknown
    )
