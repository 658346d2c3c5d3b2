"""`POST /v1/chat/completions`: OpenAI's, with vLLM's additions and our own.

Tools are shown to the template. Calls are read out of the text where the model's family writes them
in a way that is known here; where they are forced, the grammar makes the text nothing but calls.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

from fastapi import Body, FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from specrouter.http.answer_schemas import OpenAIObject
from specrouter.http.bodies import Unread
from specrouter.http.chat_answer import ChatAnswer, NewReader
from specrouter.http.openai_answer import Prompt
from specrouter.http.openai_fields import ChatRequest
from specrouter.http.openapi import generation
from specrouter.http.service import Asked, Service
from specrouter.http.tools.call_reader import CallReader
from specrouter.http.tools.forced_calls import forced_calls
from specrouter.http.tools.formats import HERMES, has_single_calls
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
    async def chat_completions(
        body: Annotated[Unread[ChatRequest], Body()], request: HttpRequest
    ) -> Response:
        return await service.respond(request, body, partial(_asked, service))


def _asked(service: Service, body: ChatRequest, request: HttpRequest) -> Asked:
    """Raises `RequestError`."""
    service.check_choices(1, body.samples)
    service.check_room()
    structure, reader = _form(service, body)
    check = partial(service.router.limits.check_text, "messages")
    ids = service.template.token_ids(body, body.tool_choice != "none", check)
    room = max(1, service.router.limits.max_tokens - len(ids))  # none: the router refuses it
    unasked = min(room, service.router.config.engine.unasked_tokens or room)
    params = body.sampling_params(
        service.openai_defaults,
        max_new_tokens=unasked if body.asked_tokens is None else body.asked_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structure=structure,
        cache_salt=service.cache_salt(request, body),
        # The reader looks for the tags in the text.
        shown_special_token_ids=None if reader is None else service.tool_tag_ids,
    )
    answer = ChatAnswer(
        body, service.envelope(request, "chatcmpl"), Prompt(ids), service.texts, reader
    )
    return Asked(service.requests(request, body, params, [ids], [True]), answer)


def _form(service: Service, body: ChatRequest) -> tuple[Structure | None, NewReader | None]:
    """What the text must look like, and what reads calls out of it. Raises `RequestError`."""
    use, (structure, _), known = body.tool_use, body.asked_structure, service.tool_format
    if use is None:
        return structure, None
    if has_single_calls(service.template.source):
        use = replace(use, max_calls=1)
    form = known or HERMES
    if use.forced:
        structure = forced_calls(use, form, service.router.check_structure)
    elif known is None or structure is not None:  # the text is what was asked for, whatever it says
        return structure, None
    return structure, partial(CallReader, form, use.names, use.forced, use.max_calls)
