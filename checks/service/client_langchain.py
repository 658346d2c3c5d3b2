"""LangChain's OpenAI client against the service: structured output in all its ways, and tools.

Runs in an environment that has `langchain-openai`.
"""

from typing import Any

from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from checks.service.report import Report, run_client
from checks.service.tool_schemas import MODEL, QUESTION, Person, weather


def main(report: Report, url: str, key: str) -> None:
    chat: Any = ChatOpenAI(
        model=MODEL, base_url=f"{url}/v1", api_key=key, max_retries=0, max_tokens=300, timeout=120
    )
    with report.check("default mode"):
        assert isinstance(chat.with_structured_output(Person).invoke(QUESTION), Person)
    for method in ("function_calling", "json_schema"):
        with report.check(method):
            found = chat.with_structured_output(Person, method=method).invoke(QUESTION)
            assert isinstance(found, Person)
    for choice in ("any", "weather"):
        with report.check(f"tools, {choice}"):
            check_tools(chat, choice)
    with report.check("tools, left to the model"):
        message = chat.bind_tools([tool(weather)]).invoke(QUESTION)
        assert message.content or message.tool_calls


def check_tools(chat: Any, choice: str) -> None:
    """A call, the same as a stream, and a turn with its result."""
    own = tool(weather)
    bound = chat.bind_tools([own], tool_choice=choice, parallel_tool_calls=False).bind(seed=1)
    message = bound.invoke(QUESTION)
    [call] = message.tool_calls
    assert call["name"] == "weather"
    assert message.response_metadata["finish_reason"] == "tool_calls"
    result = own.invoke(call["args"])
    streamed = None
    for chunk in bound.stream(QUESTION):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    assert [(one["name"], one["args"]) for one in streamed.tool_calls] == [
        (call["name"], call["args"])
    ]
    history = [("user", QUESTION), message, ToolMessage(result, tool_call_id=call["id"])]
    assert isinstance(chat.bind(max_tokens=8).invoke(history).content, str)


if __name__ == "__main__":
    run_client("langchain-openai", main)
