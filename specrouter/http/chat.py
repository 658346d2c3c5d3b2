"""`POST /v1/chat/completions`: OpenAI's endpoint, with vLLM's additions and our own.

Tools are shown to the template. Reasoning and calls are parsed from the text if the format of the
model's family is known. Where calls are forced, the grammar allows nothing but calls after the
reasoning. A structure applies to the content, also after reasoning.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import TypeAdapter

from specrouter.http.openai_answer import (
    AnsweredPrompt,
    OpenAIAnswer,
    OpenAIObject,
    ending,
    finite,
    output_of,
)
from specrouter.http.openai_fields import ChatRequest
from specrouter.http.openapi import generation
from specrouter.http.reasoning.answer_reader import AnswerReader, CallNews
from specrouter.http.service import Service, Submission
from specrouter.http.streams import Outputs
from specrouter.http.token_texts import TokenTexts
from specrouter.http.tools.call_reader import CallReader
from specrouter.http.tools.forced_calls import forced_calls
from specrouter.http.tools.formats import HERMES, ToolFormat, has_single_calls
from specrouter.request.output import Delta, RequestOutput, TokenLogprobs
from specrouter.request.structure import Structure

_PROMPT_END = 64  # last tokens of the prompt, in which the answer may begin
_ENDS_BY_ITSELF = ("eos", "stop")
_BODY = TypeAdapter(ChatRequest)
_MakeReader = Callable[[], AnswerReader]


def add_chat(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/chat/completions",
        **generation(
            "Answer to a conversation",
            OpenAIObject,
            _BODY,
            messages=[{"role": "user", "content": "Add 2 and 3."}],
            max_tokens=32,
        ),
    )
    async def chat_completions(request: HttpRequest) -> Response:
        return await service.respond(request, _BODY, partial(_asked, service))


def _asked(service: Service, body: ChatRequest, request: HttpRequest) -> Submission:
    """Return the requests and the answer of a body, or raise `RequestError`."""
    service.check_choices(1, body.samples)
    service.check_room()
    check = partial(service.router.limits.check_text, "messages")
    ids = service.template.token_ids(body, body.tool_choice != "none", check)
    structure, reader = _form(service, body, ids)
    room = max(1, service.router.limits.max_tokens - len(ids))  # no room: the router refuses it
    unasked = min(room, service.router.config.engine.unasked_tokens or room)
    params = body.sampling_params(
        service.openai_defaults,
        max_new_tokens=unasked if body.asked_tokens is None else body.asked_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structure=structure,
        cache_salt=service.cache_salt(request, body),
        # Readers need the tags in the text.
        shown_special_token_ids=None if reader is None else service.special_tag_ids,
    )
    answer = ChatAnswer(
        body, service.envelope(request, "chatcmpl"), AnsweredPrompt(ids), service.texts, reader
    )
    return Submission(service.requests(request, body, params, [ids], [True]), answer)


def _form(
    service: Service, body: ChatRequest, ids: Sequence[int]
) -> tuple[Structure | None, _MakeReader | None]:
    """Return the structure of the text, and a factory of readers of its reasoning and calls.

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
    elif structure is not None:  # the content is not parsed for calls
        structure, use = Structure(structure.kind, structure.source, around), None
    elif service.tool_format is None:
        use = None
    if thinks is None and use is None:
        return structure, None
    names = use.names if use else frozenset[str]()
    only = next(iter(names)) if len(names) == 1 else None
    limits = (use.forced, use.max_calls, only) if use else ()
    channels = partial(thinks.channels, opening, names) if thinks else None

    def reader() -> AnswerReader:
        calls = CallReader(form, names) if use and isinstance(form, ToolFormat) else None
        return AnswerReader(channels, calls, *limits)

    return structure, reader


def _answer_begins(service: Service, body: ChatRequest, ids: Sequence[int]) -> tuple[str, bool]:
    """Return the arguments of `opening` in `reasoning.formats`."""
    if not body.continue_final_message:
        return service.texts.of(list(ids[-_PROMPT_END:])), False
    return str(body.turns()[-1].get("content") or ""), True


class ChatAnswer(OpenAIAnswer):
    """Answer of `/v1/chat/completions`, whole or in chunks.

    A stream's deltas, joined as OpenAI's clients join them, are the message of the whole answer,
    except for the ids of its calls, which are random.
    """

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    body: ChatRequest

    def __init__(
        self,
        body: ChatRequest,
        envelope: dict[str, Any],
        prompt: AnsweredPrompt,
        texts: TokenTexts,
        reader: _MakeReader | None = None,
    ) -> None:
        """Create an answer; `reader` makes each choice's reader, and without it all is content."""
        super().__init__(body, envelope, [prompt], texts)
        self._readers = defaultdict[int, AnswerReader](reader) if reader else None  # by choice

    def whole(self, outputs: Outputs) -> dict[str, Any]:
        return {**super().whole(outputs), **self.of_prompt(0, outputs[0][1])}

    def chunk(self, prompt: int, delta: Delta) -> dict[str, Any] | None:
        is_first = not self._begun
        chunk = super().chunk(prompt, delta)
        return chunk if chunk is None or not is_first else {**chunk, **self.of_prompt(0, delta)}

    def choice(
        self, prompt: int, index: int, part: RequestOutput | Delta, is_first: bool
    ) -> dict[str, Any]:
        reader = None if self._readers is None else self._readers[index]
        if reader is not None:
            tokens = map(self.texts.text, part.token_ids)
            self._usage.reasoning_tokens += sum(map(reader.is_reasoning, tokens))
        is_delta, output = isinstance(part, Delta), output_of(part)
        said: dict[str, Any] = {"role": "assistant"} if is_first else {}
        if not is_delta:
            said["refusal"] = None
        if reader is None:
            said["content"] = part.text
        else:
            news = reader.read(part.text, ends=output is not None)
            is_elsewhere = is_delta or reader.calls or reader.forced or news.reasoning
            if news.content or is_first:
                said["content"] = news.content or (None if is_elsewhere else "")
            if news.reasoning and self.body.include_reasoning is not False:
                # DeepSeek's name of the field, and vLLM's.
                said |= {"reasoning_content": news.reasoning, "reasoning": news.reasoning}
            if news.calls:
                said["tool_calls"] = [_call(call, is_delta) for call in news.calls]
        rest = {"logprobs": self._logprobs(part.logprobs), **ending(output)}
        if output is not None and output.finish_reason in _ENDS_BY_ITSELF and _has_called(reader):
            rest["finish_reason"] = "tool_calls"
        if self.body.return_token_ids:
            rest["token_ids"] = list(part.token_ids)
        return {"index": index, "delta" if is_delta else "message": said, **rest}

    def says_something(self, choice: Mapping[str, Any]) -> bool:
        news = choice["delta"]
        return any(news.get(field) for field in ("content", "tool_calls", "reasoning"))

    def _logprobs(self, positions: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        if positions is None:
            return None
        content = [
            {
                **self._candidate(one.token_id, one.logprob),
                "top_logprobs": [
                    self._candidate(*other) for other in one.top[: self.body.top_logprobs or 0]
                ],
            }
            for one in positions
        ]
        return {"content": content, "refusal": None}

    def _candidate(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.texts.text(token),
            "logprob": finite(logprob),
            "bytes": list(self.texts.data(token)),
        }


def _has_called(reader: AnswerReader | None) -> bool:
    """Return whether there are calls and the last is complete: a stop text may cut it."""
    return reader is not None and reader.calls > 0 and not reader.is_within_call


def _call(news: CallNews, is_delta: bool) -> dict[str, Any]:
    """Return a new call, or more arguments of one, as OpenAI's object."""
    place = {"index": news.index} if is_delta else {}
    if news.name is None:
        return {**place, "function": {"arguments": news.arguments}}
    function = {"name": news.name, "arguments": news.arguments}
    return {
        **place,
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": function,
    }
