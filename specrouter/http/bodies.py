"""Request bodies: received as bytes in the event loop, parsed in a thread.

Contract: nothing of a body is parsed in the event loop, so that streams and `/health` go on
meanwhile. A body that Python cannot parse gets `invalid_json`, also for bytes that are not UTF-8,
nesting that is too deep, and numbers with too many digits. What does not fit the declared fields
is refused with the place of each mistake, as FastAPI refuses it.
"""

from __future__ import annotations

import json
from email.message import Message
from typing import Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError

Body = TypeVar("Body")

_NO_JSON = {"type": "missing", "loc": ("body",), "msg": "is no JSON"}


async def json_data(request: Request) -> bytes:
    """Return a JSON body; `RequestValidationError` if it is empty or has another type."""
    header = Message()
    header["content-type"] = request.headers.get("content-type", "")
    main, sub = header.get_content_maintype(), header.get_content_subtype()
    data = await request.body()
    if not data or main != "application" or not (sub == "json" or sub.endswith("+json")):
        raise RequestValidationError([_NO_JSON])
    return data


def read_body(data: bytes, kind: TypeAdapter[Body]) -> Body:
    """Parse and validate a body, or raise `RequestValidationError`."""
    try:
        return kind.validate_python(loaded(data))
    except json.JSONDecodeError as error:
        place, reason = ("body", error.pos), {"error": error.msg}
        fault = {"type": "json_invalid", "loc": place, "ctx": reason}
        raise RequestValidationError([fault]) from error
    except ValidationError as error:
        errors = error.errors(include_url=False)
        raise RequestValidationError(
            [{**one, "loc": ("body", *one["loc"])} for one in errors]
        ) from error


def loaded(body: bytes) -> Any:
    """Parse JSON; every failure is a `JSONDecodeError`."""
    try:
        return json.loads(body)
    except json.JSONDecodeError:
        raise
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not {error.encoding.upper()}"
        raise json.JSONDecodeError(reason, "", error.start) from error
    except RecursionError as error:
        raise json.JSONDecodeError("it is nested too deeply", "", 0) from error
    except ValueError as error:  # Python parses no integer of over 4,300 digits
        raise json.JSONDecodeError("a number has too many digits", "", 0) from error
