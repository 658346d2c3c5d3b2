"""Frameworks over OpenAI's client: structured output in their default mode and others, and tools.

Contract: the wire is tested, not the model's sense: what is asked for is bounded, so that any model
ends it, and whatever it says is of the schema.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from checks.service.client import MODEL, Checks

QUESTION = "Anna is 5 years old."
_USER: list[Any] = [{"role": "user", "content": QUESTION}]


class Person(BaseModel):
    """A person."""

    name: Literal["Anna", "Ben"]
    age: Annotated[int, Field(ge=0, le=120)]
    nickname: Annotated[str, Field(max_length=6)] = ""


def weather(city: Literal["Oslo", "Bergen"], days: Annotated[int, Field(ge=1, le=9)]) -> str:
    """The weather of a city in the next days."""
    return f"{city}: {days} days of rain"


def _is_person(answer: Callable[[], object]) -> None:
    assert isinstance(answer(), Person)


def instructor_checks(url: str, key: str) -> Checks:
    import instructor
    from openai import OpenAI

    inner = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)
    asked: dict[str, Any] = {"model": MODEL, "messages": _USER, "max_retries": 0, "max_tokens": 200}

    def persons(**mode: Any) -> None:
        client: Any = instructor.from_openai(inner, **mode)
        for seed in range(3):
            person = client.chat.completions.create(response_model=Person, seed=seed, **asked)
            assert isinstance(person, Person)

    def stream() -> None:
        client: Any = instructor.from_openai(inner)
        parts = list(client.chat.completions.create_partial(response_model=Person, **asked))
        assert len(parts) > 1
        Person.model_validate(parts[-1].model_dump())

    yield "default mode", persons
    for name in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"):
        yield name, partial(persons, mode=instructor.Mode[name])
    yield "a stream of parts", stream


def pydantic_ai_checks(url: str, key: str) -> Checks:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key))

    def agent(output: Any = str, tokens: int = 300) -> Any:
        return Agent(model, output_type=output, model_settings={"max_tokens": tokens})

    def person(output: Any) -> None:
        result = agent(output).run_sync(QUESTION)
        assert isinstance(result.output, Person)
        assert result.usage.output_tokens > 0

    async def streamed() -> object:
        async with agent(Person).run_stream(QUESTION) as result:
            return await result.get_output()

    def text() -> None:
        assert isinstance(agent(tokens=16).run_sync("Hello").output, str)

    yield "text", text
    yield "default mode", partial(person, Person)
    yield "NativeOutput", partial(person, NativeOutput(Person))
    yield "a stream of parts", partial(_is_person, lambda: asyncio.run(streamed()))


def langchain_checks(url: str, key: str) -> Checks:
    from langchain_core.messages import ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    chat: Any = ChatOpenAI(
        model=MODEL, base_url=f"{url}/v1", api_key=key, max_retries=0, max_tokens=300, timeout=120
    )
    own: Any = tool(weather)

    def person(**method: str) -> None:
        assert isinstance(chat.with_structured_output(Person, **method).invoke(QUESTION), Person)

    def tools(choice: str) -> None:
        """A call, the same as a stream, and a turn with its result."""
        bound = chat.bind_tools([own], tool_choice=choice, parallel_tool_calls=False).bind(seed=1)
        message = bound.invoke(QUESTION)
        [call] = message.tool_calls
        assert call["name"] == "weather"
        assert message.response_metadata["finish_reason"] == "tool_calls"
        first, *rest = bound.stream(QUESTION)
        streamed = sum(rest, first)
        told = [(one["name"], one["args"]) for one in streamed.tool_calls]
        assert told == [(call["name"], call["args"])]
        result = ToolMessage(own.invoke(call["args"]), tool_call_id=call["id"])
        history = [("user", QUESTION), message, result]
        assert isinstance(chat.bind(max_tokens=8).invoke(history).content, str)

    def left_to_the_model() -> None:
        message = chat.bind_tools([own]).invoke(QUESTION)
        assert message.content or message.tool_calls

    yield "default mode", person
    for method in ("function_calling", "json_schema"):
        yield method, partial(person, method=method)
    for choice in ("any", "weather"):
        yield f"tools, {choice}", partial(tools, choice)
    yield "tools, left to the model", left_to_the_model


def llama_index_checks(url: str, key: str) -> Checks:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.prompts import PromptTemplate
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    llm: Any = OpenAILike(
        model=MODEL, api_base=f"{url}/v1", api_key=key, max_tokens=300, max_retries=0, timeout=120,
        is_chat_model=True, is_function_calling_model=True, context_window=1024,
    )  # fmt: skip
    asked = [ChatMessage(role="user", content=QUESTION)]

    def tools() -> None:
        required = {"user_msg": QUESTION, "tool_required": True, "allow_parallel_tool_calls": False}
        offered = [FunctionTool.from_defaults(weather)]
        *_, last = llm.stream_chat_with_tools(offered, **required)
        for answer in (llm.chat_with_tools(offered, **required), last):
            [call] = llm.get_tool_calls_from_response(answer)
            assert call.tool_name == "weather"
            assert weather(**call.tool_kwargs)

    def chat() -> None:
        assert llm.chat(asked, max_tokens=16)

    yield "chat", chat
    yield (
        "default mode of structured output",
        partial(_is_person, lambda: llm.structured_predict(Person, PromptTemplate(QUESTION))),
    )
    yield (
        "a structured chat",
        partial(_is_person, lambda: llm.as_structured_llm(Person).chat(asked).raw),
    )
    yield "tools, required", tools
