"""`POST /tokenize` and `POST /detokenize`, as vLLM has them.

Contract: they have a thread of their own, so that they never delay a request for a text; beyond
`MAX_WAITING_TOKENIZE` waiting requests the answer is 503. A text may be as long as a prompt's, and
have `LONG_CHARACTERS` in any case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Discriminator, Tag, TypeAdapter

from specrouter.http.answers import AnswerModel
from specrouter.http.bodies import json_data, read_body
from specrouter.http.openapi import BODY_REFUSALS, TOKENS, described
from specrouter.http.service import Service
from specrouter.http.streams import PartsResponse
from specrouter.request.conversation import Conversation
from specrouter.request.fields import Fields, Text, TokenIds
from specrouter.request.lanes import LONG_CHARACTERS, MAX_WAITING_TOKENIZE
from specrouter.request.params import RequestError


class TokenizeText(Fields):
    model: Text | None = None
    """Name of the target; may be absent."""
    prompt: Text
    """Text to split into tokens."""
    add_special_tokens: bool | None = None
    """Adds the tokenizer's special tokens; true by default."""
    return_token_strs: bool | None = None
    """Returns the tokens' texts too."""


class TokenizeChat(Conversation):
    model: Text | None = None
    """Name of the target; may be absent."""
    return_token_strs: bool | None = None
    """Returns the tokens' texts too."""


def _tokenize_kind(body: Any) -> str:
    is_chat = "messages" in body if isinstance(body, dict) else isinstance(body, TokenizeChat)
    return "conversation" if is_chat else "one_text"


TokenizeRequest = Annotated[
    Annotated[TokenizeText, Tag("one_text")] | Annotated[TokenizeChat, Tag("conversation")],
    Discriminator(_tokenize_kind),
]


class DetokenizeRequest(Fields):
    model: Text | None = None
    """Name of the target; may be absent."""
    tokens: TokenIds
    """Token ids."""


_Fields = TypeVar("_Fields", TokenizeText | TokenizeChat, DetokenizeRequest)
_TOKENIZE: TypeAdapter[TokenizeText | TokenizeChat] = TypeAdapter(TokenizeRequest)
_DETOKENIZE = TypeAdapter(DetokenizeRequest)


class TokenizeAnswer(AnswerModel):
    count: int
    """Number of tokens."""
    max_model_len: int
    """Maximum tokens of a request, prompt and output."""
    tokens: list[int]
    """Token ids."""
    token_strs: list[str] | None
    """Texts of the tokens, or null if they were not requested."""


class DetokenizeAnswer(AnswerModel):
    prompt: str
    """Text of the tokens."""


def add_tokens(app: FastAPI, service: Service) -> None:
    @app.post(
        "/tokenize",
        **described(
            TOKENS,
            "Tokens of a text or a conversation",
            TokenizeAnswer,
            _TOKENIZE,
            (*BODY_REFUSALS, 404),
            example={"prompt": "def fib(n):"},
        ),
    )
    async def tokenize(request: Request) -> Response:
        return await _run(service, request, _TOKENIZE, _tokenized)

    @app.post(
        "/detokenize",
        **described(
            TOKENS,
            "Text of token ids",
            DetokenizeAnswer,
            _DETOKENIZE,
            (*BODY_REFUSALS, 404),
            example={"tokens": [5, 6, 7]},
        ),
    )
    async def detokenize(request: Request) -> Response:
        return await _run(service, request, _DETOKENIZE, _detokenized)


async def _run(
    service: Service,
    request: Request,
    kind: TypeAdapter[_Fields],
    answer: Callable[[Service, _Fields], Response],
) -> Response:
    data = await json_data(request)

    def job() -> Response:
        body = read_body(data, kind)
        service.check_model(body.model)
        return answer(service, body)

    return await service.router.lanes.run("tokenize", job, max_waiting=MAX_WAITING_TOKENIZE)


def _detokenized(service: Service, body: DetokenizeRequest) -> Response:
    most = _most(service.router.limits.max_tokens)
    if len(body.tokens) > most:
        raise RequestError("tokens", f"has {len(body.tokens)} ids, more than {most}")
    known = service.router.pool.vocab_size
    if any(token >= known for token in body.tokens):
        raise RequestError("tokens", f"must be from 0 to {known - 1}")
    return JSONResponse({"prompt": service.texts.of(body.tokens)})


def _tokenized(service: Service, body: TokenizeRequest) -> Response:
    """Answer `/tokenize`: seconds of work for the longest text, while streams go on."""
    tokens = _tokens(service, body)
    pieces = None
    if body.return_token_strs:
        pieces = [str(piece) for piece in service.tokenizer.convert_ids_to_tokens(tokens)]
    return PartsResponse(
        {
            "count": len(tokens),
            "max_model_len": service.router.limits.max_tokens,
            "tokens": tokens,
            "token_strs": pieces,
        }
    )


def _tokens(service: Service, body: TokenizeRequest) -> list[int]:
    most = _most(service.router.limits.max_characters)

    def check(text: str) -> None:
        if len(text) > most:
            field = "prompt" if isinstance(body, TokenizeText) else "messages"
            raise RequestError(field, f"has {len(text)} characters, more than {most}")

    if not isinstance(body, TokenizeText):
        return service.template.token_ids(body, True, check)
    check(body.prompt)
    special = body.add_special_tokens is not False
    return list(service.tokenizer(body.prompt, add_special_tokens=special)["input_ids"])


def _most(of_a_prompt: int) -> int:
    return max(of_a_prompt, LONG_CHARACTERS)
