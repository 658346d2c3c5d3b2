"""`POST /v1/chat/completions`: OpenAI's, with vLLM's additions and our own.

Tools are shown to the template. Reasoning and calls are read out of the text where the model's
family writes them in a way that is known here; where calls are forced, the grammar makes the text
nothing but calls behind its reasoning. A structure is that of the content, behind reasoning, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated

from fastapi import Body, FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from specrouter.http.answer_schemas import OpenAIObject
from specrouter.http.bodies import Unread
from specrouter.http.chat_answer import ChatAnswer, Reading
from specrouter.http.openai_answer import Prompt
from specrouter.http.openai_fields import ChatRequest
from specrouter.http.openapi import generation
from specrouter.http.reasoning.answer_reader import AnswerReader
from specrouter.http.reasoning.formats import Channels
from specrouter.http.service import Asked, Service
from specrouter.http.tools.call_reader import CallReader
from specrouter.http.tools.forced_calls import forced_calls
from specrouter.http.tools.formats import HERMES, ToolFormat, has_single_calls
from specrouter.http.tools.tool_use import ToolUse
from specrouter.request.structure import Structure

_PROMPT_END = 64  # tokens that may hold the beginning of the answer


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
    check = partial(service.router.limits.check_text, "messages")
    ids = service.template.token_ids(body, body.tool_choice != "none", check)
    structure, reading = _form(service, body, ids)
    room = max(1, service.router.limits.max_tokens - len(ids))  # none: the router refuses it
    unasked = min(room, service.router.config.engine.unasked_tokens or room)
    params = body.sampling_params(
        service.openai_defaults,
        max_new_tokens=unasked if body.asked_tokens is None else body.asked_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structure=structure,
        cache_salt=service.cache_salt(request, body),
        # Readers look for the tags in the text.
        shown_special_token_ids=None if reading is None else service.special_tag_ids,
    )
    answer = ChatAnswer(
        body, service.envelope(request, "chatcmpl"), Prompt(ids), service.texts, reading
    )
    return Asked(service.requests(request, body, params, [ids], [True]), answer)


def _form(
    service: Service, body: ChatRequest, ids: Sequence[int]
) -> tuple[Structure | None, Reading | None]:
    """What the text must look like, and what reads reasoning and calls out of it.

    Raises `RequestError`.
    """
    use, (structure, _), thinks = body.tool_use, body.asked_structure, service.reasoning
    own = thinks.calls if thinks else None
    if use is not None and (own or has_single_calls(service.template.source)):
        use = replace(use, max_calls=1)
    is_forced = use is not None and use.forced
    opening = thinks.opening(*_answer_begins(service, body, ids)) if thinks else ""
    around = thinks.around(opening, service.tag_ids, is_forced) if thinks else ""
    form = service.tool_format or own or HERMES
    if use is not None and is_forced:
        check = service.router.check_structure
        structure = forced_calls(use, form, check, service.tag_ids, around)
    elif structure is not None:  # the content is what was asked for, whatever it says
        structure, use = Structure(structure.kind, structure.source, around), None
    elif service.tool_format is None:
        use = None
    calls = None
    if use is not None and isinstance(form, ToolFormat):
        calls = partial(CallReader, form, use.names, use.forced, use.max_calls)
    if thinks is None:
        return structure, None if calls is None else Reading(calls)
    channels = partial(thinks.channels, opening, () if use is None else use.names)
    return structure, Reading(partial(_reader, channels, calls, use), channels)


def _reader(
    channels: Callable[[], Channels], calls: Callable[[], CallReader] | None, use: ToolUse | None
) -> AnswerReader:
    return AnswerReader(
        channels(),
        calls and calls(),
        forced=use is not None and use.forced,
        max_calls=None if use is None else use.max_calls,
    )


def _answer_begins(service: Service, body: ChatRequest, ids: Sequence[int]) -> tuple[str, bool]:
    """See `reasoning.channels`."""
    if not body.continue_final_message:
        return service.texts.of(list(ids[-_PROMPT_END:])), False
    return str(body.turns()[-1].get("content") or ""), True
