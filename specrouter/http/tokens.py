"""`POST /tokenize` and `POST /detokenize`, as vLLM has them."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from specrouter.http.answer_schemas import DetokenizeAnswer, TokenizeAnswer
from specrouter.http.openapi import TOKENS, body_answers, with_example
from specrouter.http.service import Service
from specrouter.http.streams import PartsResponse
from specrouter.http.token_fields import DetokenizeRequest, TokenizeRequest, TokenizeText
from specrouter.request.params import RequestError


def add_tokens(app: FastAPI, service: Service) -> None:
    @app.post(
        "/tokenize",
        tags=[TOKENS],
        summary="The tokens of a text or a conversation",
        responses=body_answers(TokenizeAnswer, 404),
        openapi_extra=with_example(prompt="def fib(n):"),
    )
    async def tokenize(body: TokenizeRequest) -> Response:
        service.check_model(body.model)
        return await asyncio.to_thread(_tokenized, service, body)

    @app.post(
        "/detokenize",
        tags=[TOKENS],
        summary="The text of tokens",
        responses=body_answers(DetokenizeAnswer, 404),
        openapi_extra=with_example(tokens=[5, 6, 7]),
    )
    async def detokenize(body: DetokenizeRequest) -> Response:
        service.check_model(body.model)
        known = service.router.pool.vocab_size
        if any(token >= known for token in body.tokens):
            raise RequestError("tokens", f"must be from 0 to {known - 1}")
        text = await asyncio.to_thread(service.texts.of, body.tokens)
        return JSONResponse({"prompt": text})


def _tokenized(service: Service, body: TokenizeRequest) -> Response:
    """Seconds of work for a text as long as a body may be, during which streams go on."""
    tokens = _tokens(service, body)
    pieces = None
    if body.return_token_strs:
        pieces = [str(piece) for piece in service.tokenizer.convert_ids_to_tokens(tokens)]
    return PartsResponse(
        {
            "count": len(tokens),
            "max_model_len": service.router.max_request_tokens,
            "tokens": tokens,
            "token_strs": pieces,
        }
    )


def _tokens(service: Service, body: TokenizeRequest) -> list[int]:
    if not isinstance(body, TokenizeText):
        return service.template.token_ids(body)
    special = body.add_special_tokens is not False
    return list(service.tokenizer(body.prompt, add_special_tokens=special)["input_ids"])
