"""LlamaIndex' OpenAI-like client against the service: structured output and tools.

Runs in an environment that has `llama-index-llms-openai-like`.
"""

from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from checks.service.report import Report, run_client
from checks.service.tool_schemas import MODEL, QUESTION, Person, weather


def main(report: Report, url: str, key: str) -> None:
    llm: Any = OpenAILike(
        model=MODEL, api_base=f"{url}/v1", api_key=key, max_tokens=300, max_retries=0, timeout=120,
        is_chat_model=True, is_function_calling_model=True, context_window=1024,
    )  # fmt: skip
    with report.check("chat"):
        assert llm.chat([ChatMessage(role="user", content="Hello")], max_tokens=16)
    with report.check("default mode of structured output"):
        found = llm.structured_predict(Person, PromptTemplate(QUESTION))
        assert isinstance(found, Person)
    with report.check("a structured chat"):
        answer = llm.as_structured_llm(Person).chat([ChatMessage(role="user", content=QUESTION)])
        assert isinstance(answer.raw, Person)
    with report.check("tools, required"):
        check_tools(llm)


def check_tools(llm: Any) -> None:
    asked = {"user_msg": QUESTION, "tool_required": True, "allow_parallel_tool_calls": False}
    tools = [FunctionTool.from_defaults(weather)]
    [call] = llm.get_tool_calls_from_response(llm.chat_with_tools(tools, **asked))
    assert call.tool_name == "weather"
    assert weather(**call.tool_kwargs)
    *_, last = llm.stream_chat_with_tools(tools, **asked)
    [call] = llm.get_tool_calls_from_response(last)
    assert weather(**call.tool_kwargs)


if __name__ == "__main__":
    run_client("llama-index-llms-openai-like", main)
