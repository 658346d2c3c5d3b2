"""Base classes of the objects in answers, and the shape of all errors.

Contract: imports nothing that takes long, so that errors can be answered while models are loaded.
They have OpenAI's shape, `{"error": {message, type, param, code}}`. The text below a field is its
description in the API's schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict
from starlette.responses import JSONResponse, Response


class AnswerModel(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class Loose(AnswerModel):
    """Object with further fields for what the request asks for."""

    model_config = ConfigDict(extra="allow")


class FeasibleObjective(AnswerModel):
    ttft_ms: float | None
    """Time to the first token in milliseconds, or null if unknown."""
    tpot_ms: float | None
    """Mean time of an output token after the first in milliseconds, or null if unknown."""


class ErrorDetails(AnswerModel):
    message: str
    """Explanation of the error."""
    type: str
    """`invalid_request_error` for 4xx, `server_error` for 5xx."""
    param: str | None
    """Path of the wrong field, such as `messages[0].content`."""
    code: str | None
    """Error code for programs, such as `context_length_exceeded`."""
    feasible: FeasibleObjective | None = None
    """Earliest objective that could have been attained; only with `slo_unattainable`."""


class ErrorAnswer(AnswerModel):
    error: ErrorDetails
    """The error."""


def error_payload(
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    details: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the body of an error; `details` are further keys of its `error` object."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    # A field's name may hold half a surrogate pair, which UTF-8 cannot encode.
    message, param = _encodable(message), None if param is None else _encodable(param)
    error = ErrorDetails(message=message, type=kind, param=param, code=code, **(details or {}))
    return ErrorAnswer(error=error).model_dump(exclude_unset=True)


def error_response(
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    payload = error_payload(status, message, param, code)
    return JSONResponse(payload, status_code=status, headers=dict(headers or {}))


def overloaded(message: str, retry_after_s: int = 1, **headers: str) -> Response:
    """Return the 503 of a service that has too much to do.

    The default `Retry-After` is short: behind a load balancer the retry meets another server.
    """
    headers = {"Retry-After": str(retry_after_s), **headers}
    return error_response(503, message, code="overloaded", headers=headers)


def shutting_down() -> Response:
    return error_response(
        503,
        "the service is shutting down and takes no new requests",
        code="shutting_down",
        headers={"Retry-After": "1", "Connection": "close"},  # the retry meets another server
    )


def _encodable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
