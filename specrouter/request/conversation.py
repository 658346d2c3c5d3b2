"""Conversation: the messages of a chat, and the form in which templates read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from specrouter.request.fields import (
    Fields,
    KeptFields,
    Refused,
    Text,
    asks_for_nothing,
    check_refused,
    refused,
)
from specrouter.request.params import RequestError

MAX_MESSAGES = 16_384
MAX_PARTS = 4096  # of a message's content

# Fields of messages, parts, calls and tools that cannot change an answer. Clients send them for
# other servers, or as part of an earlier answer.
IGNORED = frozenset((
    "annotations", "cache_control", "copilot_cache_control", "id", "index", "parsed",
    "parsed_arguments", "provider_specific_fields",
))  # fmt: skip
_REASONING = {"reasoning_content", "reasoning"}  # of earlier answers; most templates leave it out
_TOOL, _CALL = {"type", "function"}, {"id", "type", "function"}
# Forced calls are always strict; transformers adds `return` for a Python function.
_FUNCTION = {"name", "description", "parameters", "strict", "return"}
_CALLED = {"name", "arguments"}


class ContentPart(KeptFields):
    """A part of a message's content; one of another type than text is refused, by its place."""

    type: Text
    """`text`, or `refusal` as answers have had it."""
    text: Text | None = None
    """The part's text."""
    refusal: Text | None = None
    """The text of a `refusal`."""


class Message(KeptFields):
    """A message of a chat. Unknown fields are passed to the template, if it reads them."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Role of the message's author."""
    content: Text | Annotated[list[ContentPart], Field(max_length=MAX_PARTS)] | None = None
    """A text, or a list of text parts; may be null beside tool calls."""
    name: Text | None = None
    """Name of the author, passed to the template."""
    tool_calls: list[dict[str, Any]] | None = None
    """Calls that the assistant made, in OpenAI's form."""
    tool_call_id: Text | None = None
    """Id of the call that a `tool` message answers."""
    refusal: Text | None = None
    """Text with which the assistant refused to answer."""


class Conversation(Fields):
    """The messages of a chat, and the variables of its template."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    """The conversation so far, which the chat template turns into a prompt."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the model may call, in OpenAI's form; passed to the template."""
    documents: list[dict[str, Any]] | None = None
    """Documents, passed to the template."""
    reasoning_effort: Text | None = None
    """Reasoning effort, passed to the template."""
    add_special_tokens: bool | None = None
    """The tokenizer's, around what the template made; false by default."""
    add_generation_prompt: bool | None = None
    """The prompt ends with the beginning of an answer; true by default."""
    continue_final_message: bool | None = None
    """The output continues the last message instead of answering it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the template, such as `enable_thinking`."""
    chat_template: Refused = refused("is the service's (server.chat_template)")

    def check_keys(self, is_read: Callable[[str], bool]) -> None:
        """Raise `RequestError` for a key that is unknown here, not read, and not in `IGNORED`.

        Args:
            is_read: returns whether the template reads a name.
        """
        for place, given, known in self._objects(with_functions=not is_read("tojson")):
            for key, value in given.items():
                if not (key in known or key in IGNORED or asks_for_nothing(value) or is_read(key)):
                    raise RequestError(f"{place}{key}", "is not read by the chat template")

    def _objects(
        self, with_functions: bool
    ) -> Iterator[tuple[str, Mapping[str, Any], Collection[str]]]:
        """Yield the objects that may hold a client's own keys: place, keys, and the known ones.

        `with_functions`: include tools and calls, of which `tojson` in a template reads all keys.
        """
        yield "", {"documents": self.documents}, ()
        variables = self.chat_template_kwargs or {}  # where false has a meaning
        yield (
            "chat_template_kwargs.",
            {name: one is not None for name, one in variables.items()},
            (),
        )
        for at, message in enumerate(self.messages):
            yield f"messages[{at}].", message.model_extra or {}, _REASONING
            calls = (message.tool_calls or ()) if with_functions else ()
            yield from _functions(f"messages[{at}].tool_calls", calls, _CALL, _CALLED)
        tools = (self.tools or ()) if with_functions else ()
        yield from _functions("tools", tools, _TOOL, _FUNCTION)

    def turns(
        self, null_contents: bool = False, text_arguments: bool = False
    ) -> list[dict[str, Any]]:
        """Return the messages as templates read them: contents are texts, arguments objects.

        Args:
            null_contents: keep a null content beside calls, instead of leaving it out.
            text_arguments: give arguments as JSON text, the client's own if it sent some.

        Raises:
            RequestError: names the message, and the part of it; or a template, which is a program
                and not accepted from clients.
        """
        check_refused(self)
        return [
            _turn(f"messages[{at}]", message, null_contents, text_arguments)
            for at, message in enumerate(self.messages)
        ]


def _functions(
    place: str, objects: Sequence[dict[str, Any]], own: Collection[str], inner: Collection[str]
) -> Iterator[tuple[str, Mapping[str, Any], Collection[str]]]:
    for at, one in enumerate(objects):
        yield f"{place}[{at}].", one, own
        function = one.get("function")
        if isinstance(function, dict):
            yield f"{place}[{at}].function.", function, inner


def _turn(
    place: str, message: Message, null_contents: bool, text_arguments: bool
) -> dict[str, Any]:
    turn = {**message.model_dump(exclude_none=True, exclude={"refusal"}), "role": message.role}
    if message.refusal and (message.content or message.role != "assistant"):
        raise RequestError(f"{place}.refusal", "is what an assistant says instead of a content")
    if isinstance(message.content, list):
        parts = [
            part_text(f"{place}.content[{at}]", part) for at, part in enumerate(message.content)
        ]
        turn["content"] = "\n".join(parts)
    elif message.content is None:
        if message.role != "assistant" or message.model_fields_set == {"role"}:
            raise RequestError(f"{place}.content", "is missing")
        if not message.tool_calls:  # an answer whose limit was reached during thinking
            turn["content"] = ""
        elif null_contents:
            turn["content"] = None
    if message.refusal:
        turn["content"] = message.refusal
    if message.tool_calls:
        if message.role != "assistant":
            raise RequestError(f"{place}.tool_calls", "are an assistant's only")
        turn["tool_calls"] = [
            _call(f"{place}.tool_calls[{at}]", call, text_arguments)
            for at, call in enumerate(message.tool_calls)
        ]
    else:  # templates test for the field, not for a call in it
        turn.pop("tool_calls", None)
    return turn


def part_text(place: str, part: ContentPart) -> str:
    if part.type not in ("text", "refusal"):
        raise RequestError(place, f"is of type {part.type[:40]!r}; only text is understood")
    said = part.text if part.type == "text" else part.refusal
    if said is None:
        raise RequestError(f"{place}.{part.type}", "is missing")
    for key, value in (part.model_extra or {}).items():
        if key not in IGNORED and not asks_for_nothing(value):
            raise RequestError(f"{place}.{key}", "is unknown")
    return said


def _call(place: str, call: dict[str, Any], as_text: bool) -> dict[str, Any]:
    """Return a call with its arguments as an object, or as text for templates that need JSON text.

    OpenAI has JSON text. For a call without arguments, clients send no text.
    """
    if call.get("type") not in (None, "function"):
        raise RequestError(f"{place}.type", 'must be "function"')
    function = call.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"{place}.function", "must be an object")
    if not function.get("name") or not isinstance(function["name"], str):
        raise RequestError(f"{place}.function.name", "must be a text")
    given = function.get("arguments")
    text = (given or "").strip() or "{}" if given is None or isinstance(given, str) else None
    try:
        parsed = given if text is None else json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise RequestError(f"{place}.function.arguments", "must be a JSON object")
    if as_text:
        parsed = json.dumps(given, ensure_ascii=False) if text is None else text
    return {**call, "function": {**function, "arguments": parsed}}
