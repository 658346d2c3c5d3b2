"""`POST /v1/completions`: OpenAI's, with vLLM's additions and our own.

The choices of a prompt follow one another: choice `prompt * n + sample`. `echo` with `max_tokens` 0
reads the prompt only: the router makes one token, which nobody sees.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace

from fastapi import FastAPI, Request
from fastapi.responses import Response
from transformers import PreTrainedTokenizerBase

from specrouter.http.answer_schemas import OpenAIObject
from specrouter.http.completion_answer import CompletionAnswer
from specrouter.http.errors import field_names
from specrouter.http.openai_answer import Prompt
from specrouter.http.openai_fields import CompletionRequest
from specrouter.http.openapi import generation
from specrouter.http.service import Service
from specrouter.http.streams import Deltas, respond
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
    async def completions(body: CompletionRequest, request: Request) -> Response:
        service.check_model(body.model)
        with field_names(body.field_names()):
            body.check()
            service.check_choices(len(body.prompts), body.samples)
            params = sampling_params(body)
            service.check_room()
            for field, text in body.texts():
                service.router.check_text(field, text)
            characters = sum(len(text) for _, text in body.texts())
            prompts = await service.tokenized(characters, _prompts, service.tokenizer, body)
            envelope = service.envelope(request, "cmpl")
            answer = CompletionAnswer(body, envelope, prompts, service.texts)
            ids = [prompt.token_ids for prompt in prompts]
            deltas = service.deltas(request, body, ids, params)
            if body.asked_tokens == 0:
                deltas = _without_tokens(deltas)
            return await respond(request, deltas, answer, bool(body.stream))


def sampling_params(body: CompletionRequest) -> SamplingParams:
    """Raises `RequestError`, by the names of `SamplingParams`."""
    asked = _DEFAULT_TOKENS if body.asked_tokens is None else body.asked_tokens
    logprobs, prompt_logprobs = body.logprobs, body.prompt_logprobs
    if logprobs is not None and body.echo:
        prompt_logprobs = max(logprobs, prompt_logprobs or 0)
    if logprobs is None and body.samples > (body.n or 1):
        logprobs = 0  # to find the best ones
    structure, _ = body.asked_structure
    return body.sampling_params(
        max_new_tokens=max(1, asked),
        temperature=1.0 if body.temperature is None else body.temperature,
        n=body.samples,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structure=structure,
    )


def _prompts(tokenizer: PreTrainedTokenizerBase, body: CompletionRequest) -> list[Prompt]:
    special = body.add_special_tokens is not False
    return [
        Prompt(tokenizer(one, add_special_tokens=special)["input_ids"], one)
        if isinstance(one, str)
        else Prompt(one)
        for one in body.prompts
    ]


async def _without_tokens(deltas: Deltas) -> Deltas:
    """Only what is known of the prompts."""
    async with aclosing(deltas):
        async for prompt, delta in deltas:
            if delta.output is not None:
                yield prompt, _emptied(delta)


def _emptied(delta: Delta) -> Delta:
    """A last delta without tokens, unless it failed."""
    output = delta.output
    assert output is not None
    if output.finish_reason not in ("eos", "stop", "length"):
        return delta
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
