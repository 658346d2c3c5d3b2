"""The shape of all errors, which is OpenAI's: `{"error": {message, type, param, code}}`.

Contract: imports nothing that takes long, so that errors can be told while models are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse, Response


def error_payload(
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    details: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """`details`: further keys of the error."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    # A field's name may hold half a surrogate pair, which UTF-8 cannot.
    message, param = _encodable(message), None if param is None else _encodable(param)
    error = {"message": message, "type": kind, "param": param, "code": code}
    return {"error": {**error, **(details or {})}}


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
    """By default the next try may come at once: behind a balancer it meets another server."""
    headers = {"Retry-After": str(retry_after_s), **headers}
    return error_response(503, message, code="overloaded", headers=headers)


def shutting_down() -> Response:
    return error_response(
        503,
        "the service is shutting down and takes no new requests",
        code="shutting_down",
        headers={"Retry-After": "1", "Connection": "close"},  # the next try meets another server
    )


def _encodable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
