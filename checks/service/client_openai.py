"""The official OpenAI client against the service: texts, chats, tools and predicted outputs."""

import asyncio
import json
from functools import partial
from typing import Any

import jsonschema
import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from checks.service.client import MODEL, Checks
from checks.service.client_frameworks import QUESTION, Person

_PROMPT = "def fibonacci(n):\n"
_ASKED: dict[str, Any] = {"model": MODEL, "prompt": _PROMPT, "max_tokens": 32, "temperature": 0}
_MESSAGES: list[Any] = [{"role": "user", "content": "Write a short function."}]
_CHAT: dict[str, Any] = {
    "model": MODEL, "messages": _MESSAGES, "max_completion_tokens": 24, "temperature": 0,
}  # fmt: skip
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["colour", "count", "tags"],
    "additionalProperties": False,
}


_ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Bergen"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "note": {"type": "string", "maxLength": 10},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
_NAMED = {"type": "function", "function": {"name": "weather"}}
_TOOLS: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 300,
    "tools": [
        {"type": "function", "function": {"name": "weather", "parameters": _ARGUMENTS}},
        {"type": "function", "function": {"name": "nothing"}},
    ],
}  # fmt: skip


class Answer(BaseModel):
    agrees: bool
    digit: int


def openai_checks(url: str, key: str) -> Checks:
    client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)
    for check in (
        check_models, check_completion, check_completion_stream, check_logprobs, check_echo,
        check_samples, check_stop, check_chat, check_chat_stream, check_chat_logprobs,
        check_json_schema, check_parse, check_errors, check_named_tool, check_required_tools,
        check_tool_stream, check_tools_left_to_the_model, check_tool_results,
        check_tool_stream_helper, check_parsed_tools, check_cut_tool, check_prediction,
    ):  # fmt: skip
        name = check.__name__.removeprefix("check_").replace("_", " ")
        yield name, partial(check, client)
    yield "async, eight at once", lambda: asyncio.run(check_async(url, key))
    yield "AuthenticationError for a wrong key", partial(check_wrong_key, url)


def check_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def check_completion(client: OpenAI) -> None:
    completion = client.completions.create(**_ASKED)
    (choice,) = completion.choices
    assert choice.text
    assert choice.finish_reason == "length"
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 32
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + 32
    several = client.completions.create(**{**_ASKED, "prompt": [_PROMPT, "import os\n"]})
    assert [one.index for one in several.choices] == [0, 1]
    assert several.choices[0].text == choice.text


def check_completion_stream(client: OpenAI) -> None:
    """Deltas of several tokens come in one chunk, and add up to the whole text."""
    whole = client.completions.create(**_ASKED).choices[0].text
    options = {"include_usage": True}
    stream = client.completions.create(
        **_ASKED, stream=True, stream_options=options, extra_body={"return_token_ids": True}
    )
    chunks = list(stream)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == whole
    assert [one.finish_reason for one in choices if one.finish_reason] == ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 32
    counts = [len(choice.model_extra["token_ids"]) for choice in choices]
    assert sum(counts) == 32
    assert max(counts) > 1, "no chunk has several tokens: nothing was speculated"


def check_logprobs(client: OpenAI) -> None:
    choice = client.completions.create(**_ASKED, logprobs=3).choices[0]
    found = choice.logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 32
    assert "".join(found.tokens) == choice.text
    for chosen, top in zip(found.token_logprobs, found.top_logprobs, strict=True):
        assert chosen == max(top.values())  # greedy
        assert 3 <= len(top) <= 4
    offsets = found.text_offset
    assert offsets == sorted(offsets)


def check_echo(client: OpenAI) -> None:
    asked = {**_ASKED, "max_tokens": 1}
    choice = client.completions.create(**asked, echo=True, logprobs=1).choices[0]
    assert choice.text.startswith(_PROMPT)
    assert choice.logprobs.token_logprobs[0] is None
    assert all(one <= 0 for one in choice.logprobs.token_logprobs[1:])


def check_samples(client: OpenAI) -> None:
    asked = {**_ASKED, "temperature": 1, "seed": 5}
    one = client.completions.create(**asked).choices[0].text
    three = client.completions.create(**asked, n=3).choices
    assert [choice.index for choice in three] == [0, 1, 2]
    assert three[0].text == one
    assert len({choice.text for choice in three}) == 3
    again = client.completions.create(**asked, extra_body={"speculation": "off"}).choices[0].text
    assert again == one


def check_stop(client: OpenAI) -> None:
    whole = client.completions.create(**_ASKED).choices[0].text
    stop = whole[10:13]
    choice = client.completions.create(**_ASKED, stop=[stop]).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.text == whole[: whole.index(stop)]


def check_chat(client: OpenAI) -> None:
    chat = client.chat.completions.create(**_CHAT)
    (choice,) = chat.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert chat.usage.completion_tokens <= 24


def check_chat_stream(client: OpenAI) -> None:
    whole = client.chat.completions.create(**_CHAT).choices[0]
    stream = client.chat.completions.create(**_CHAT, stream=True)
    choices = [choice for chunk in stream for choice in chunk.choices]
    assert choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in choices) == whole.message.content
    ends = [choice.finish_reason for choice in choices if choice.finish_reason]
    assert ends == [whole.finish_reason]


def check_chat_logprobs(client: OpenAI) -> None:
    choice = client.chat.completions.create(**_CHAT, logprobs=True, top_logprobs=2).choices[0]
    positions = choice.logprobs.content
    assert positions
    for position in positions:
        assert len(position.top_logprobs) == 2
        assert position.logprob == position.top_logprobs[0].logprob
    spelled = b"".join(bytes(position.bytes) for position in positions)
    assert spelled.decode(errors="replace").startswith(choice.message.content)


def check_json_schema(client: OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": _SCHEMA}}
    asked = {**_CHAT, "max_completion_tokens": 200, "temperature": 1, "seed": 3}
    choice = client.chat.completions.create(**asked, response_format=form).choices[0]
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), _SCHEMA)
    asked = {**_CHAT, "max_completion_tokens": 300}
    plain = client.chat.completions.create(**asked, response_format={"type": "json_object"})
    if plain.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(plain.choices[0].message.content), dict)


def check_parse(client: OpenAI) -> None:
    """The client makes the schema from a pydantic model, and the model from the answer."""
    chat = client.chat.completions.parse(
        model=MODEL, messages=_MESSAGES, max_completion_tokens=200, response_format=Answer
    )
    assert isinstance(chat.choices[0].message.parsed, Answer)


def check_named_tool(client: OpenAI) -> None:
    answer = client.chat.completions.create(tool_choice=_NAMED, n=4, seed=1, **_TOOLS)
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        [call] = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "weather")
        jsonschema.validate(json.loads(call.function.arguments), _ARGUMENTS)
    ids = [choice.message.tool_calls[0].id for choice in answer.choices]
    assert len(set(ids)) == len(ids)


def check_required_tools(client: OpenAI) -> None:
    for parallel in (True, False):
        answer = client.chat.completions.create(
            tool_choice="required", parallel_tool_calls=parallel, n=4, seed=2, **_TOOLS
        )
        for choice in answer.choices:
            calls = choice.message.tool_calls
            assert {call.function.name for call in calls} <= {"weather", "nothing"}
            assert parallel or len(calls) == 1
            assert parallel or choice.finish_reason == "tool_calls"


def check_tool_stream(client: OpenAI) -> None:
    asked = {**_TOOLS, "tool_choice": _NAMED, "seed": 3}
    whole = client.chat.completions.create(**asked).choices[0].message.tool_calls[0].function
    chunks = list(client.chat.completions.create(stream=True, **asked))
    told = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert (told[0].index, told[0].type, told[0].function.name) == (0, "function", "weather")
    assert told[0].id
    assert all(call.id is None and call.function.name is None for call in told[1:])
    assert "".join(call.function.arguments or "" for call in told) == whole.arguments
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "tool_calls"


def check_tools_left_to_the_model(client: OpenAI) -> None:
    for choice in ("auto", "none"):
        asked = {**_TOOLS, "tool_choice": choice, "max_tokens": 16, "temperature": 0}
        answer = client.chat.completions.create(**asked)
        assert isinstance(answer.choices[0].message.content, str)


def check_tool_results(client: OpenAI) -> None:
    """A turn after a call: the message as it came, and what the function said."""
    message = client.chat.completions.create(tool_choice=_NAMED, **_TOOLS).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Rain."}
    asked = {**_TOOLS, "messages": [*_TOOLS["messages"], message, result], "max_tokens": 8}
    assert isinstance(client.chat.completions.create(**asked).choices[0].message.content, str)


def check_tool_stream_helper(client: OpenAI) -> None:
    asked = {**_TOOLS, "tools": [openai.pydantic_function_tool(Person)], "tool_choice": "required"}
    with client.chat.completions.stream(parallel_tool_calls=False, **asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    assert isinstance(final.choices[0].message.tool_calls[0].function.parsed_arguments, Person)


def check_parsed_tools(client: OpenAI) -> None:
    asked = {**_TOOLS, "tools": [openai.pydantic_function_tool(Person)], "tool_choice": "required"}
    answer = client.chat.completions.parse(parallel_tool_calls=False, **asked)
    [call] = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Person)


def check_cut_tool(client: OpenAI) -> None:
    asked = {**_TOOLS, "tool_choice": _NAMED, "max_tokens": 14}
    assert client.chat.completions.create(**asked).choices[0].finish_reason == "length"


def check_prediction(client: OpenAI) -> None:
    asked = {"model": MODEL, "messages": _TOOLS["messages"], "max_tokens": 32, "temperature": 0}
    plain = client.chat.completions.create(**asked).choices[0].message.content
    prediction: Any = {"type": "content", "content": plain}
    answer = client.chat.completions.create(prediction=prediction, **asked)
    assert answer.choices[0].message.content == plain
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens >= 0


def check_errors(client: OpenAI) -> None:
    for field, wrong in (("temperature", -1), ("top_p", 0), ("n", 0), ("max_tokens", 10**6)):
        error = _refusal(client, openai.BadRequestError, {field: wrong})
        assert error.param == field, f"{field}: {error}"
        assert error.type == "invalid_request_error"
    assert _refusal(client, openai.NotFoundError, {"model": "no-such"}).param == "model"
    try:
        client.models.retrieve("no-such")
    except openai.NotFoundError:
        return
    raise AssertionError("an unknown model is retrieved")


def check_wrong_key(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
    _refusal(client, openai.AuthenticationError, {})


async def check_async(url: str, key: str) -> None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        whole = (await client.completions.create(**_ASKED)).choices[0].text

        async def streamed() -> str:
            stream = await client.completions.create(**_ASKED, stream=True)
            return "".join([one.text async for chunk in stream for one in chunk.choices])

        assert await asyncio.gather(*(streamed() for _ in range(8))) == [whole] * 8


def _refusal(client: OpenAI, kind: type[Any], changes: dict[str, Any]) -> Any:
    try:
        client.completions.create(**{**_ASKED, **changes})
    except kind as error:
        return error
    raise AssertionError(f"{changes} is accepted")
