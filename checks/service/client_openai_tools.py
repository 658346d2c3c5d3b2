"""Tools and predicted outputs by the official OpenAI client.

Runs in an environment that has `openai` and `jsonschema`.
"""

import json
from typing import Any

import jsonschema
import openai
from openai import OpenAI

from checks.service.report import Report, run_client
from checks.service.tool_schemas import MODEL, QUESTION, Person

_SCHEMA: dict[str, Any] = {
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
_ASKED: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 300,
    "tools": [
        {"type": "function", "function": {"name": "weather", "parameters": _SCHEMA}},
        {"type": "function", "function": {"name": "nothing"}},
    ],
}  # fmt: skip


def main(report: Report, url: str, key: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)
    for check in (
        check_named, check_required, check_stream, check_left_to_the_model, check_results,
        check_stream_helper, check_parse, check_length, check_refusals, check_prediction,
    ):  # fmt: skip
        with report.check(check.__name__.removeprefix("check_").replace("_", " ")):
            check(client)


def check_named(client: OpenAI) -> None:
    answer = client.chat.completions.create(tool_choice=_NAMED, n=4, seed=1, **_ASKED)
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        [call] = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "weather")
        jsonschema.validate(json.loads(call.function.arguments), _SCHEMA)
    ids = [choice.message.tool_calls[0].id for choice in answer.choices]
    assert len(set(ids)) == len(ids)


def check_required(client: OpenAI) -> None:
    for parallel in (True, False):
        answer = client.chat.completions.create(
            tool_choice="required", parallel_tool_calls=parallel, n=4, seed=2, **_ASKED
        )
        for choice in answer.choices:
            calls = choice.message.tool_calls
            assert {call.function.name for call in calls} <= {"weather", "nothing"}
            assert parallel or len(calls) == 1
            assert parallel or choice.finish_reason == "tool_calls"


def check_stream(client: OpenAI) -> None:
    asked = {**_ASKED, "tool_choice": _NAMED, "seed": 3}
    whole = client.chat.completions.create(**asked).choices[0].message.tool_calls[0].function
    chunks = list(client.chat.completions.create(stream=True, **asked))
    told = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert (told[0].index, told[0].type, told[0].function.name) == (0, "function", "weather")
    assert told[0].id
    assert all(call.id is None and call.function.name is None for call in told[1:])
    assert "".join(call.function.arguments or "" for call in told) == whole.arguments
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "tool_calls"


def check_left_to_the_model(client: OpenAI) -> None:
    for choice in ("auto", "none"):
        asked = {**_ASKED, "tool_choice": choice, "max_tokens": 16, "temperature": 0}
        answer = client.chat.completions.create(**asked)
        assert isinstance(answer.choices[0].message.content, str)


def check_results(client: OpenAI) -> None:
    """A turn after a call: the message as it came, and what the function said."""
    message = client.chat.completions.create(tool_choice=_NAMED, **_ASKED).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Rain."}
    asked = {**_ASKED, "messages": [*_ASKED["messages"], message, result], "max_tokens": 8}
    assert isinstance(client.chat.completions.create(**asked).choices[0].message.content, str)


def check_stream_helper(client: OpenAI) -> None:
    asked = {**_ASKED, "tools": [openai.pydantic_function_tool(Person)], "tool_choice": "required"}
    with client.chat.completions.stream(parallel_tool_calls=False, **asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    assert isinstance(final.choices[0].message.tool_calls[0].function.parsed_arguments, Person)


def check_parse(client: OpenAI) -> None:
    asked = {**_ASKED, "tools": [openai.pydantic_function_tool(Person)], "tool_choice": "required"}
    answer = client.chat.completions.parse(parallel_tool_calls=False, **asked)
    [call] = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Person)


def check_length(client: OpenAI) -> None:
    asked = {**_ASKED, "tool_choice": _NAMED, "max_tokens": 14}
    assert client.chat.completions.create(**asked).choices[0].finish_reason == "length"


def check_refusals(client: OpenAI) -> None:
    twice = [_ASKED["tools"][0]] * 2
    for param, changes in (
        ("tools[1].function.name", {"tools": twice}),
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("tool_choice.function.name", {"tool_choice": {**_NAMED, "function": {"name": "no"}}}),
    ):
        assert refused_field(client, {**_ASKED, **changes}) == param


def refused_field(client: OpenAI, asked: dict[str, Any]) -> str | None:
    try:
        client.chat.completions.create(**asked)
    except openai.BadRequestError as error:
        return str(error.param)
    return None


def check_prediction(client: OpenAI) -> None:
    asked = {"model": MODEL, "messages": _ASKED["messages"], "max_tokens": 32, "temperature": 0}
    plain = client.chat.completions.create(**asked).choices[0].message.content
    prediction: Any = {"type": "content", "content": plain}
    answer = client.chat.completions.create(prediction=prediction, **asked)
    assert answer.choices[0].message.content == plain
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens >= 0


if __name__ == "__main__":
    run_client("openai", main, "openai's tools")
