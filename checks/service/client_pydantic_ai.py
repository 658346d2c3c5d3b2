"""Pydantic AI against the service: output by tools, which is its default, and by a schema.

    python -m checks.service.client_pydantic_ai URL KEY OUT

Runs in an environment that has `pydantic-ai-slim[openai]`.
"""

import asyncio
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from checks.service.report import Report
from checks.service.tool_schemas import MODEL, QUESTION, Person

_SETTINGS: Any = {"max_tokens": 300}


def main(url: str, key: str, saved: Path) -> int:
    report = Report(f"pydantic-ai {version('pydantic-ai-slim')}")
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
    report.save(saved)
    return 0 if report.passed else 1


async def check_stream(model: Any) -> None:
    agent: Any = Agent(model, output_type=Person, model_settings=_SETTINGS)
    async with agent.run_stream(QUESTION) as result:
        assert isinstance(await result.get_output(), Person)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
