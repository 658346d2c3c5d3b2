"""`POST /v1/completions`: OpenAI's, with vLLM's additions and our own.

The choices of a prompt follow one another: choice `prompt * n + sample`. `echo` with `max_tokens` 0
reads the prompt only: the router makes one token, which nobody sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from fastapi import Body, FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from transformers import PreTrainedTokenizerBase

from specrouter.http.answer_schemas import OpenAIObject
from specrouter.http.bodies import Unread
from specrouter.http.completion_answer import CompletionAnswer
from specrouter.http.openai_answer import Prompt
from specrouter.http.openai_fields import CompletionRequest
from specrouter.http.openapi import generation
from specrouter.http.service import Asked, Service
from specrouter.request.output import Delta, TokenLogprobs
from specrouter.request.params import SamplingParams

_DEFAULT_TOKENS = 16  # OpenAI's


def add_completions(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/completions",
        **generation(
            "The continuation of one or several prompts",
            OpenAIObject,
            prompt="def fib(n):",
            max_tokens=32,
            temperature=0,
        ),
    )
    async def completions(
        body: Annotated[Unread[CompletionRequest], Body()], request: HttpRequest
    ) -> Response:
        return await service.respond(request, body, partial(_asked, service))


def _asked(service: Service, body: CompletionRequest, request: HttpRequest) -> Asked:
    """Raises `RequestError`."""
    service.check_choices(len(body.prompts), body.samples)
    salt = service.cache_salt(request, body)
    params = sampling_params(body, salt, service.openai_defaults)
    service.check_room()
    for field, text in body.texts():
        service.router.limits.check_text(field, text)
    prompts = _prompts(service.tokenizer, body)
    answer = CompletionAnswer(body, service.envelope(request, "cmpl"), prompts, service.texts)
    ids, are_tokenized = (
        [one.token_ids for one in prompts],
        [one.text is not None for one in prompts],
    )
    requests = service.requests(request, body, params, ids, are_tokenized)
    return Asked(requests, answer, _without_tokens if body.asked_tokens == 0 else None)


def sampling_params(
    body: CompletionRequest, cache_salt: str | None, defaults: Mapping[str, Any]
) -> SamplingParams:
    """Raises `RequestError`, by the names of `SamplingParams`."""
    asked = _DEFAULT_TOKENS if body.asked_tokens is None else body.asked_tokens
    logprobs, prompt_logprobs = body.logprobs, body.prompt_logprobs
    if logprobs is not None and body.echo:
        prompt_logprobs = max(logprobs, prompt_logprobs or 0)
    if logprobs is None and body.samples > (body.n or 1):
        logprobs = 0  # to find the best ones
    structure, _ = body.asked_structure
    return body.sampling_params(
        defaults,
        max_new_tokens=max(1, asked),
        n=body.samples,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structure=structure,
        cache_salt=cache_salt,
    )


def _prompts(tokenizer: PreTrainedTokenizerBase, body: CompletionRequest) -> list[Prompt]:
    special = body.add_special_tokens is not False
    return [
        Prompt(tokenizer(one, add_special_tokens=special)["input_ids"], one)
        if isinstance(one, str)
        else Prompt(one)
        for one in body.prompts
    ]


def _without_tokens(delta: Delta) -> Delta | None:
    """Only what is known of the prompts: a last delta without tokens, unless it failed."""
    output = delta.output
    if output is None or output.finish_reason not in ("eos", "stop", "length"):
        return None if output is None else delta
    logprobs: list[TokenLogprobs] | None = None if output.logprobs is None else []
    bare = replace(
        output, text="", token_ids=[], finish_reason="length", logprobs=logprobs, stop_reason=None
    )
    return replace(
        delta,
        text="",
        token_ids=[],
        finish_reason="length",
        logprobs=logprobs,
        prompt_logprobs=output.prompt_logprobs,
        output=bare,
    )
