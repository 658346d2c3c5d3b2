"""BodyRoute: how a body becomes what an endpoint is given.

Contract: a large body is parsed and checked in a thread, so that streams and `/health` go on
meanwhile. Whatever is no JSON for Python is told as such (`invalid_json`): bytes that are no UTF-8,
nesting that is too deep, numbers with too many digits.
"""

from __future__ import annotations

import email.message
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from specrouter.http.body_limit import SMALL_BYTES
from specrouter.request.lanes import Lanes

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class BodyRequest(Request):
    """FastAPI asks it for its JSON, and checks that; what is checked already it lets pass."""

    checked: Any = None

    async def json(self) -> Any:
        return loaded(await self.body()) if self.checked is None else self.checked


class BodyRoute(APIRoute):
    """The application's state holds the `lanes`."""

    def get_route_handler(self) -> Handler:
        handle, field = super().get_route_handler(), self.body_field

        def checked(body: bytes) -> Any:
            assert field is not None
            try:
                value, errors = field.validate(loaded(body), {}, loc=("body",))
            except json.JSONDecodeError as error:
                raise _invalid_json(error) from error
            if errors:
                raise RequestValidationError(errors)
            return value

        async def handle_with_body(request: Request) -> Response:
            own = BodyRequest(request.scope, request.receive)
            if field is not None and _is_json(own) and len(await own.body()) > SMALL_BYTES:
                lanes: Lanes = request.app.state.lanes
                own.checked = await lanes.run("bodies", checked, await own.body(), is_large=True)
            return await handle(own)

        return handle_with_body


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


def _invalid_json(error: json.JSONDecodeError) -> RequestValidationError:
    """As FastAPI tells of it."""
    place, reason = ("body", error.pos), {"error": error.msg}
    return RequestValidationError([{"type": "json_invalid", "loc": place, "ctx": reason}])


def _is_json(request: Request) -> bool:
    """As FastAPI has it."""
    message = email.message.Message()
    message["content-type"] = request.headers.get("content-type", "")
    kind = message.get_content_subtype()
    is_application = message.get_content_maintype() == "application"
    return is_application and (kind == "json" or kind.endswith("+json"))
