"""Conversation: the messages of a chat, and what templates read of them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from specrouter.http.fields import Fields
from specrouter.http.request_fields import Refused
from specrouter.http.texts import Text
from specrouter.request.params import RequestError


class ContentPart(BaseModel):
    """A part of another type than text is refused, by its place."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")

    type: Text
    text: Text | None = None


class Message(BaseModel):
    """Unknown fields reach the template."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[ContentPart] | None = None
    name: Text | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: Text | None = None


class Conversation(Fields):
    """What a chat's prompt is made of."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Text | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Refused = None

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
        if self.chat_template is not None and self.chat_template is not False:
            raise RequestError("chat_template", "is the service's (server.chat_template)")
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
            _part_text(f"{place}.content[{at}]", part) for at, part in enumerate(message.content)
        ]
        turn["content"] = "\n".join(parts)
    elif message.content is None:
        if message.role != "assistant" or not message.tool_calls:
            raise RequestError(f"{place}.content", "is missing")
        if null_contents:
            turn["content"] = None
    if message.tool_calls:
        turn["tool_calls"] = [
            _call(f"{place}.tool_calls[{at}]", call, text_arguments)
            for at, call in enumerate(message.tool_calls)
        ]
    else:  # templates ask whether there is such a field, not whether it holds a call
        turn.pop("tool_calls", None)
    return turn


def _part_text(place: str, part: ContentPart) -> str:
    if part.type != "text":
        raise RequestError(place, f"is of type {part.type[:40]!r}; only text is understood")
    if part.text is None:
        raise RequestError(f"{place}.text", "is missing")
    return part.text


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
