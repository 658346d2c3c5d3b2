"""Conversation: the messages of a chat, and what templates read of them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from specrouter.request.fields import Fields, KeptFields, Refused, Text, check_refused, refused
from specrouter.request.params import RequestError

MAX_MESSAGES = 16_384
MAX_PARTS = 4096  # of a message's content


class ContentPart(KeptFields):
    """A part of another type than text is refused, by its place."""

    type: Text
    """`text`, or `refusal` as answers have had it."""
    text: Text | None = None
    """The part's text."""
    refusal: Text | None = None
    """The text of a `refusal`."""


class Message(KeptFields):
    """Unknown fields reach the template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Who says it."""
    content: Text | Annotated[list[ContentPart], Field(max_length=MAX_PARTS)] | None = None
    """A text, or a list of text parts; may be null beside tool calls."""
    name: Text | None = None
    """Handed to the template."""
    tool_calls: list[dict[str, Any]] | None = None
    """Calls that the assistant made, as OpenAI has them."""
    tool_call_id: Text | None = None
    """Of the call that a `tool` message answers."""


class Conversation(Fields):
    """What a chat's prompt is made of."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    """The conversation so far, which the chat template turns into a prompt."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the model may call, as OpenAI has them; handed to the template."""
    documents: list[dict[str, Any]] | None = None
    """Handed to the template."""
    reasoning_effort: Text | None = None
    """Handed to the template."""
    add_special_tokens: bool | None = None
    """The tokenizer's, around what the template made; false by default."""
    add_generation_prompt: bool | None = None
    """The prompt ends with the beginning of an answer; true by default."""
    continue_final_message: bool | None = None
    """The output continues the last message instead of answering it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the template, such as `enable_thinking`."""
    chat_template: Refused = refused("is the service's (server.chat_template)")

    def turns(
        self, null_contents: bool = False, text_arguments: bool = False
    ) -> list[dict[str, Any]]:
        """The messages as templates read them: contents are texts, arguments of calls objects.

        Args:
            null_contents: beside calls; else a content that is null is left out.
            text_arguments: as JSON text, the client's own where it sent some.

        Raises:
            RequestError: names the message, and the part of it; or a template, which is a program
                and not taken from clients.
        """
        check_refused(self)
        return [
            _turn(f"messages[{at}]", message, null_contents, text_arguments)
            for at, message in enumerate(self.messages)
        ]


def _turn(
    place: str, message: Message, null_contents: bool, text_arguments: bool
) -> dict[str, Any]:
    turn = {**message.model_dump(exclude_none=True), "role": message.role}
    if isinstance(message.content, list):
        parts = [
            part_text(f"{place}.content[{at}]", part) for at, part in enumerate(message.content)
        ]
        turn["content"] = "\n".join(parts)
    elif message.content is None:
        if message.role != "assistant" or message.model_fields_set == {"role"}:
            raise RequestError(f"{place}.content", "is missing")
        if not message.tool_calls:  # as answers have it whose limit ended the thinking
            turn["content"] = ""
        elif null_contents:
            turn["content"] = None
    if message.tool_calls:
        turn["tool_calls"] = [
            _call(f"{place}.tool_calls[{at}]", call, text_arguments)
            for at, call in enumerate(message.tool_calls)
        ]
    else:  # templates ask whether there is such a field, not whether it holds a call
        turn.pop("tool_calls", None)
    return turn


def part_text(place: str, part: ContentPart) -> str:
    if part.type not in ("text", "refusal"):
        raise RequestError(place, f"is of type {part.type[:40]!r}; only text is understood")
    said = part.text if part.type == "text" else part.refusal
    if said is None:
        raise RequestError(f"{place}.{part.type}", "is missing")
    return said


def _call(place: str, call: dict[str, Any], as_text: bool) -> dict[str, Any]:
    """OpenAI has a call's arguments as JSON text, most templates as an object. Of a call without
    any, clients send no text."""
    function = call.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"{place}.function", "must be an object")
    given = function.get("arguments")
    if given is None or isinstance(given, str):
        text = (given or "").strip() or "{}"
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError):
            raise RequestError(f"{place}.function.arguments", "is no JSON") from None
        arguments = text if as_text else parsed
    else:
        arguments = json.dumps(given, ensure_ascii=False) if as_text else given
    return {**call, "function": {**function, "arguments": arguments}}
