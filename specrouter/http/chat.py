"""`POST /v1/chat/completions`: OpenAI's, with vLLM's additions and our own.

Tools are shown to the template. Calls are read out of the text where the model's family writes them
in a way that is known here; where they are forced, the grammar makes the text nothing but calls.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fastapi import FastAPI, Request
from fastapi.responses import Response

from specrouter.http.answer_schemas import OpenAIObject
from specrouter.http.chat_answer import ChatAnswer, NewReader
from specrouter.http.errors import field_names
from specrouter.http.openai_answer import Prompt
from specrouter.http.openai_fields import ChatRequest
from specrouter.http.openapi import generation
from specrouter.http.service import Service
from specrouter.http.streams import respond
from specrouter.http.tools.call_reader import CallReader
from specrouter.http.tools.forced_calls import forced_calls
from specrouter.http.tools.formats import HERMES, has_single_calls
from specrouter.request.params import SamplingParams
from specrouter.request.structure import Structure


def add_chat(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/chat/completions",
        **generation(
            "An answer to a conversation",
            OpenAIObject,
            messages=[{"role": "user", "content": "Add 2 and 3."}],
            max_tokens=32,
        ),
    )
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        service.check_model(body.model)
        with field_names(body.field_names()):
            body.check()
            service.check_choices(1, body.samples)
            service.check_room()
            structure, reader = await _form(service, body)
            with_tools = body.tool_choice != "none"
            check = partial(service.router.check_text, "messages")
            ids = await service.tokenized(
                body.characters, service.template.token_ids, body, with_tools, check
            )
            room = service.router.max_request_tokens - len(ids)
            room = max(1, room)  # the router refuses what has no room
            params = sampling_params(body, room, structure)
            if reader is not None:  # which looks for the tags in the text
                params = replace(params, shown_special_token_ids=service.tool_tag_ids)
            envelope = service.envelope(request, "chatcmpl")
            answer = ChatAnswer(body, envelope, Prompt(ids), service.texts, reader)
            deltas = service.deltas(request, body, [ids], params)
            return await respond(request, deltas, answer, bool(body.stream))


def sampling_params(body: ChatRequest, room: int, structure: Structure | None) -> SamplingParams:
    """`room`: tokens that fit, which is the default. Raises `RequestError`, by the names of
    `SamplingParams`."""
    return body.sampling_params(
        max_new_tokens=room if body.asked_tokens is None else body.asked_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structure=structure,
    )


async def _form(service: Service, body: ChatRequest) -> tuple[Structure | None, NewReader | None]:
    """What the text must look like, and what reads calls out of it. Raises `RequestError`."""
    use, (structure, _), known = body.tool_use, body.asked_structure, service.tool_format
    if use is None:
        return structure, None
    if has_single_calls(service.template.source):
        use = replace(use, max_calls=1)
    form = known or HERMES
    if use.forced:
        lanes, check = service.router.lanes, service.router.check_structure
        structure = await lanes.run("structures", forced_calls, use, form, check)
    elif known is None or structure is not None:  # the text is what was asked for, whatever it says
        return structure, None
    return structure, partial(CallReader, form, use.names, use.forced, use.max_calls)
