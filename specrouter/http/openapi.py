"""Parts of the API's schema other than fields: groups of endpoints, bodies, answers, errors."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, TypeAdapter

from specrouter.http.answers import ErrorAnswer
from specrouter.http.objective_fields import SLO_HEADERS

GENERATION, TOKENS, MODELS = "Generation", "Tokens", "Models"
ROUTER, OPERATION = "Router", "Operation"
TAGS = [
    {"name": GENERATION, "description": "OpenAI's endpoints, and SpecRouter's own."},
    {"name": TOKENS, "description": "Tokenizing, as in vLLM."},
    {"name": MODELS, "description": "The models that are served."},
    {"name": ROUTER, "description": "The router's decisions and their outcomes."},
    {"name": OPERATION, "description": "For probes and monitoring; no key needed."},
]

_REASONS = {
    400: "A field is wrong; `param` names it",
    401: "An API key is missing or wrong",
    404: "There is no such model",
    405: "The path has other methods",
    408: "The request's time was up",
    413: "The body is too large",
    500: "The generation failed",
    503: "Too many requests wait, the objective cannot be attained, or the service stops; see "
    "`Retry-After`",
}
BODY_REFUSALS = (400, 401, 413)
_SLO_PARAMETERS = [
    {
        "name": header,
        "in": "header",
        "required": False,
        "description": f"The objective {name}, in milliseconds",
        "schema": {"type": "number", "exclusiveMinimum": 0},
    }
    for name, header in SLO_HEADERS.items()
]


def described(
    tag: str,
    summary: str,
    answer: type,
    body: TypeAdapter[Any] | None = None,
    refusals: Iterable[int] = (401,),
    example: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return arguments of `app.get` or `app.post`; `example` is a body to try."""
    responses: dict[int | str, Any] = {
        200: {"model": answer},
        **{status: {"model": ErrorAnswer, "description": _REASONS[status]} for status in refusals},
        # FastAPI would add its own 422, which is never sent.
        "default": {"model": ErrorAnswer, "description": "Any other error"},
    }
    found = {"tags": [tag], "summary": summary, "responses": responses}
    if body is None:
        return found
    content = {"schema": _schema(body), "example": example}
    asked = {"required": True, "content": {"application/json": content}}
    return {**found, "openapi_extra": {"requestBody": asked}}


@functools.cache
def _schema(body: TypeAdapter[Any]) -> dict[str, Any]:
    """Return a body's JSON schema; it is shared, so that no caller may change it."""
    schemas, parts = TypeAdapter.json_schemas(
        [("body", "validation", body)], ref_template="#/components/schemas/{model}"
    )
    return {**schemas["body", "validation"], **parts}


def generation(
    summary: str, answer: type[BaseModel], body: TypeAdapter[Any], **example: Any
) -> dict[str, Any]:
    """Return arguments of `app.post` for generation, with streams and headers of objectives."""
    refusals = (*BODY_REFUSALS, 404, 408, 500, 503)
    found = described(GENERATION, summary, answer, body, refusals, example)
    found["responses"][200]["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    found["openapi_extra"]["parameters"] = _SLO_PARAMETERS
    return found


def with_shared_parts(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the API's schema, with the parts of bodies moved to its shared components."""
    for operations in schema["paths"].values():
        for operation in operations.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                schema["components"]["schemas"] |= content["schema"].pop("$defs", {})
    return schema
