"""LiteLLM against the service. With LITELLM_LOCAL_MODEL_COST_MAP set it fetches nothing."""

import asyncio
import json
from functools import partial
from typing import Any

import litellm

from checks.service.client import MODEL, Checks

_MESSAGES = [{"role": "user", "content": "Write a short function."}]


def litellm_checks(url: str, key: str) -> Checks:
    for provider in ("openai", "hosted_vllm"):
        asked: dict[str, Any] = {
            "model": f"{provider}/{MODEL}", "api_base": f"{url}/v1", "api_key": key,
            "messages": _MESSAGES, "max_tokens": 24, "temperature": 0, "num_retries": 0,
        }  # fmt: skip
        yield f"{provider}: whole, streamed and asynchronous", partial(check_completion, asked)
    yield "tools", partial(check_tools, asked)
    yield "text completion", partial(check_text, url, key)
    yield "errors keep their kinds", partial(check_errors, asked)


def check_completion(asked: dict[str, Any]) -> None:
    answer = litellm.completion(**asked)
    text = answer.choices[0].message.content
    assert isinstance(text, str)
    assert text
    assert answer.usage.completion_tokens <= 24
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == text
    assert len([choice for choice in choices if choice.finish_reason]) == 1
    later = asyncio.run(litellm.acompletion(**asked))
    assert later.choices[0].message.content == text


def check_tools(asked: dict[str, Any]) -> None:
    """A required call, and the same as a stream."""
    schema = {
        "type": "object", "properties": {"city": {"enum": ["Oslo", "Bergen"]}},
        "required": ["city"],
    }  # fmt: skip
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    call = {**asked, "tools": tools, "tool_choice": "required", "max_tokens": 200}
    call["parallel_tool_calls"] = False
    [choice] = litellm.completion(**call).choices
    assert choice.finish_reason == "tool_calls"
    [made] = choice.message.tool_calls
    assert json.loads(made.function.arguments)["city"] in ("Oslo", "Bergen")
    built: Any = litellm.stream_chunk_builder(list(litellm.completion(**call, stream=True)))
    [streamed] = built.choices[0].message.tool_calls
    assert streamed.function.arguments == made.function.arguments


def check_text(url: str, key: str) -> None:
    asked: dict[str, Any] = {
        "model": f"text-completion-openai/{MODEL}", "prompt": "def f(", "api_base": f"{url}/v1",
        "api_key": key, "max_tokens": 16, "temperature": 0,
    }  # fmt: skip
    whole = litellm.text_completion(**asked).choices[0].text
    parts = [chunk.choices[0].text for chunk in litellm.text_completion(**asked, stream=True)]
    assert "".join(part or "" for part in parts) == whole


def check_errors(asked: dict[str, Any]) -> None:
    for kind, changes in (
        (litellm.BadRequestError, {"temperature": -1}),
        (litellm.NotFoundError, {"model": "openai/no-such"}),
        (litellm.AuthenticationError, {"api_key": "wrong"}),
    ):
        try:
            litellm.completion(**{**asked, **changes})
        except kind:
            continue
        raise AssertionError(f"{changes} is accepted")
