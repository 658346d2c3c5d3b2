"""What the API's schema says of answers, which are made as plain dicts."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from specrouter.http.request_fields import SLO_HEADERS


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    error: ErrorDetails


class _Loose(BaseModel):
    """More fields may come with what is asked for."""

    model_config = ConfigDict(extra="allow")


class OpenAIObject(_Loose):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[dict[str, Any]]
    usage: dict[str, Any]


class GenerateAnswerObject(_Loose):
    """With `n` above 1: `choices` and `seed`."""

    seed: int


class ModelObject(BaseModel):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(BaseModel):
    object: str
    data: list[ModelObject]


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(BaseModel):
    prompt: str


class VersionAnswer(BaseModel):
    version: str


class HealthAnswer(BaseModel):
    status: str


_REASONS = {
    400: "A field is wrong; `param` names it",
    401: "An API key is missing or wrong",
    404: "There is no such model",
    405: "The path knows other methods",
    408: "The request's time was up",
    413: "The body is too large",
    500: "The generation failed",
    503: "Too many requests wait, or the service is stopping; see `Retry-After`",
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
