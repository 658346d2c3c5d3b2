"""Pydantic AI against the service: output by tools, which is its default, and by a schema.

Runs in an environment that has `pydantic-ai-slim[openai]`.
"""

import asyncio
from typing import Any

from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from checks.service.report import Report, run_client
from checks.service.tool_schemas import MODEL, QUESTION, Person

_SETTINGS: Any = {"max_tokens": 300}


def main(report: Report, url: str, key: str) -> None:
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key))
    with report.check("text"):
        text = Agent(model, model_settings={"max_tokens": 16}).run_sync("Hello").output
        assert isinstance(text, str)
    outputs: dict[str, Any] = {"default mode": Person, "NativeOutput": NativeOutput(Person)}
    for name, output in outputs.items():
        with report.check(name):
            result = Agent(model, output_type=output, model_settings=_SETTINGS).run_sync(QUESTION)
            assert isinstance(result.output, Person)
            assert result.usage.output_tokens > 0
    with report.check("a stream of parts"):
        asyncio.run(check_stream(model))


async def check_stream(model: Any) -> None:
    agent: Any = Agent(model, output_type=Person, model_settings=_SETTINGS)
    async with agent.run_stream(QUESTION) as result:
        assert isinstance(await result.get_output(), Person)


if __name__ == "__main__":
    run_client("pydantic-ai-slim", main)
