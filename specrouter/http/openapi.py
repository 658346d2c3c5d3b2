"""What the API's schema says of endpoints beside their fields: groups, answers, errors."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from specrouter.http.answer_schemas import ErrorAnswer
from specrouter.http.objective_fields import SLO_HEADERS

GENERATION, TOKENS, MODELS = "Generation", "Tokens", "Models"
ROUTER, OPERATION = "Router", "Operation"
TAGS = [
    {"name": GENERATION, "description": "OpenAI's endpoints, and SpecRouter's own."},
    {"name": TOKENS, "description": "As vLLM has them."},
    {"name": MODELS, "description": "What is served."},
    {"name": ROUTER, "description": "What the router decided, and how it went."},
    {"name": OPERATION, "description": "For probes and monitoring; no key needed."},
]

_REASONS = {
    400: "A field is wrong; `param` names it",
    401: "An API key is missing or wrong",
    404: "There is no such model",
    405: "The path knows other methods",
    408: "The request's time was up",
    413: "The body is too large",
    500: "The generation failed",
    503: "Too many requests wait, the objective cannot be attained, or the service stops; see "
    "`Retry-After`",
}
_EVERY_BODY = (400, 401, 413)
_GENERATION = (*_EVERY_BODY, 404, 408, 500, 503)

Responses = dict[int | str, dict[str, Any]]


def answers(model: type[BaseModel], *refusals: int) -> Responses:
    """Of an endpoint that takes no body."""
    refused: Responses = {
        status: {"model": ErrorAnswer, "description": _REASONS[status]} for status in refusals
    }
    # FastAPI would add its own 422, which is never sent.
    other = {"model": ErrorAnswer, "description": "Any other error"}
    return {200: {"model": model}, **refused, "default": other}


def body_answers(model: type[BaseModel], *refusals: int) -> Responses:
    return answers(model, *_EVERY_BODY, *refusals)


def generation_answers(model: type[BaseModel]) -> Responses:
    """Whole, or as a stream."""
    known = answers(model, *_GENERATION)
    known[200]["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    return known


def with_example(**body: Any) -> dict[str, Any]:
    """`openapi_extra` of a POST: a body to try."""
    return {"requestBody": {"content": {"application/json": {"example": body}}}}


def generation_extra(**body: Any) -> dict[str, Any]:
    """The same, with the headers of objectives."""
    return {**SLO_PARAMETERS, **with_example(**body)}


SLO_PARAMETERS = {
    "parameters": [
        {
            "name": header,
            "in": "header",
            "required": False,
            "description": f"The objective {name}, in milliseconds",
            "schema": {"type": "number", "exclusiveMinimum": 0},
        }
        for name, header in SLO_HEADERS.items()
    ]
}
