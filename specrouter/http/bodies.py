"""Unread: a request's body as it has arrived; whoever needs it reads it, in a thread.

Contract: nothing of a body is parsed in the event loop, so that streams and `/health` go on
meanwhile. Whatever is no JSON for Python is told as such (`invalid_json`): bytes that are no UTF-8,
nesting that is too deep, numbers with too many digits. What does not fit the declared fields is
refused as FastAPI refuses it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar, get_args

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, core_schema

Body = TypeVar("Body")


class _Arrived(bytes):
    """A body that says of itself that it is JSON."""


class Unread(Generic[Body]):
    """A body that is to be a `Body`, by whose schema the API's describes it."""

    def __init__(self, data: bytes, kind: TypeAdapter[Body]) -> None:
        self.data = data
        self._kind = kind

    def read(self) -> Body:
        """Raises `RequestValidationError`."""
        try:
            return self._kind.validate_python(loaded(self.data))
        except json.JSONDecodeError as error:  # as FastAPI tells of it
            place, reason = ("body", error.pos), {"error": error.msg}
            told = {"type": "json_invalid", "loc": place, "ctx": reason}
            raise RequestValidationError([told]) from error
        except ValidationError as error:
            errors = error.errors(include_url=False)
            told_all = [{**one, "loc": ("body", *one["loc"])} for one in errors]
            raise RequestValidationError(told_all) from error

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        [body] = get_args(source)
        kind: TypeAdapter[Body] = TypeAdapter(body)

        def arrived(value: object) -> Unread[Body]:
            if not isinstance(value, _Arrived):
                raise ValueError("is no JSON")
            return cls(value, kind)

        schema = handler.generate_schema(body)
        return core_schema.no_info_plain_validator_function(
            arrived, json_schema_input_schema=schema
        )


class BodyRoute(APIRoute):
    """FastAPI asks for a body's JSON, and is given what has arrived."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_unread(request: Request) -> Response:
            return await handle(_UnreadRequest(request.scope, request.receive))

        return handle_unread


class _UnreadRequest(Request):
    async def json(self) -> Any:
        return _Arrived(await self.body())


def loaded(body: bytes) -> Any:
    """Raises `JSONDecodeError`, whatever is wrong."""
    try:
        return json.loads(body)
    except json.JSONDecodeError:
        raise
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not {error.encoding.upper()}"
        raise json.JSONDecodeError(reason, "", error.start) from error
    except RecursionError as error:
        raise json.JSONDecodeError("it is nested too deeply", "", 0) from error
    except ValueError as error:  # Python reads no number of over 4,300 digits
        raise json.JSONDecodeError("a number has too many digits", "", 0) from error
