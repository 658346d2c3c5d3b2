"""`POST /v1/chat/completions`: OpenAI's, with vLLM's additions and our own.

Tools are shown to the template, and what the model says of them stays text: no call is parsed out
of it, and none can be forced.
"""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import Response

from specrouter.http.answer_schemas import OpenAIObject
from specrouter.http.chat_answer import ChatAnswer
from specrouter.http.errors import field_names
from specrouter.http.openai_answer import Prompt
from specrouter.http.openai_fields import ChatRequest
from specrouter.http.openapi import GENERATION, generation_answers, generation_extra
from specrouter.http.service import Service
from specrouter.http.streams import respond
from specrouter.request.params import SamplingParams


def add_chat(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/chat/completions",
        tags=[GENERATION],
        summary="An answer to a conversation",
        responses=generation_answers(OpenAIObject),
        openapi_extra=generation_extra(
            messages=[{"role": "user", "content": "Add 2 and 3."}], max_tokens=32
        ),
    )
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        service.check_model(body.model)
        with field_names(body.field_names()):
            body.check()
            service.check_choices(1, body.samples)
            service.check_room()
            with_tools = body.tool_choice != "none"
            ids = await service.tokenized(
                body.characters, service.template.token_ids, body, with_tools, service.check_chat
            )
            room = service.router.max_request_tokens - len(ids)
            params = sampling_params(body, max(1, room))  # the router refuses what has no room
            envelope = service.envelope(request, "chatcmpl")
            answer = ChatAnswer(body, envelope, Prompt(ids), service.texts)
            deltas = service.deltas(request, body, [ids], params)
            return await respond(request, deltas, answer, bool(body.stream))


def sampling_params(body: ChatRequest, room: int) -> SamplingParams:
    """`room`: tokens that fit, which is the default. Raises `RequestError`, by the names of
    `SamplingParams`."""
    structure, _ = body.asked_structure()
    return body.sampling_params(
        max_new_tokens=room if body.asked_tokens is None else body.asked_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structure=structure,
    )
