"""The official OpenAI client against the service.

Runs in an environment that has `openai`; the service has the API key and serves greedily the same
text however it is asked.
"""

import asyncio
import json
from typing import Any

import jsonschema
import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from checks.service.report import Report, run_client

_PROMPT = "def fibonacci(n):\n"
_MODEL = "tiny-8m"
_ASKED: dict[str, Any] = {"model": _MODEL, "prompt": _PROMPT, "max_tokens": 32, "temperature": 0}
_MESSAGES: list[Any] = [{"role": "user", "content": "Write a short function."}]
_CHAT: dict[str, Any] = {
    "model": _MODEL, "messages": _MESSAGES, "max_completion_tokens": 24, "temperature": 0,
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


class Answer(BaseModel):
    agrees: bool
    digit: int


def main(report: Report, url: str, key: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)
    for check in (
        check_models, check_completion, check_completion_stream, check_logprobs, check_echo,
        check_samples, check_stop, check_chat, check_chat_stream, check_chat_logprobs,
        check_json_schema, check_parse, check_errors,
    ):  # fmt: skip
        with report.check(check.__name__.removeprefix("check_").replace("_", " ")):
            check(client)
    with report.check("async, eight at once"):
        asyncio.run(check_async(url, key))
    with report.check("AuthenticationError for a wrong key"):
        check_wrong_key(url)


def check_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [_MODEL]
    assert client.models.retrieve(_MODEL).id == _MODEL


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
        model=_MODEL, messages=_MESSAGES, max_completion_tokens=200, response_format=Answer
    )
    assert isinstance(chat.choices[0].message.parsed, Answer)


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


if __name__ == "__main__":
    run_client("openai", main)
