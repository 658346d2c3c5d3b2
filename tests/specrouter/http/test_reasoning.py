"""Reasoning in chats, in front of a fake router: answers, streams, usage, histories."""

from __future__ import annotations

from typing import Any

import pytest

from specrouter.request.output import FinishReason
from tests.specrouter.fake_router import FakeRouter, FakeTokenizer
from tests.specrouter.http import client
from tests.specrouter.http.client import stream_of
from tests.specrouter.http.test_tool_calls import calls_of, joined, router_of

PATH = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
HARMONY = "{{ messages[0].content }}<|start|>assistant{# <|channel|><|message|> #}"
THINK = "{{ messages[0].content }}{# <think></think> <tool_call> #}"
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Yes."
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>'
HERMES_CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def answer_of(router: FakeRouter, **fields: Any) -> dict[str, Any]:
    return client.answer_of(router, PATH, {**CHAT, **fields})


@pytest.mark.parametrize(
    ("template", "text", "reasoning", "content", "reason"),
    [
        (HARMONY, ANALYSIS + FINAL + "<|return|>", "Hm.", "Yes.", "stop"),
        (HARMONY, ANALYSIS + CALL, "Hm.", None, "tool_calls"),
        (THINK, "<think>Hm.</think>Yes.", "Hm.", "Yes.", "stop"),
        (THINK + "<think>\n", "Hm.</think>Yes.", "Hm.", "Yes.", "stop"),
        (THINK, f"<think>Hm.</think>\n{HERMES_CALL}", "Hm.", None, "tool_calls"),
        (THINK + "<think>\n", "Hm.", "Hm.", None, "stop"),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_reasoning_and_calls_have_fields_of_their_own_whole_and_streamed(
    template: str, text: str, reasoning: str, content: str | None, reason: str, size: int
) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "stream_options": {"include_usage": True}}
    answer = answer_of(router_of(text, size, template=template), tools=TOOLS)
    [choice] = answer["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == message["reasoning"] == reasoning
    assert (message["content"], choice["finish_reason"]) == (content, reason)
    calls = [("f", '{"x": 1}')] if reason == "tool_calls" else []
    assert (calls_of(message) if calls else message.get("tool_calls", [])) == calls
    details = answer["usage"]["completion_tokens_details"]
    *chunks, last = stream_of(router_of(text, size, template=template), {**CHAT, **asked}, PATH)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    for field in ("reasoning_content", "reasoning"):
        assert "".join(delta.get(field, "") for delta in deltas) == reasoning
    assert joined(chunks) == (content or "", calls, reason)
    assert last["usage"]["completion_tokens_details"] == details
    assert len(reasoning) <= details["reasoning_tokens"] <= len(text)


def test_whoever_asks_for_no_reasoning_gets_none() -> None:
    fields = {"include_reasoning": False}
    [choice] = answer_of(router_of(ANALYSIS + FINAL, 7, template=HARMONY), **fields)["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    chunks = stream_of(router_of(ANALYSIS + FINAL, 7, template=HARMONY), {**CHAT, **fields}, PATH)
    assert joined(chunks) == ("Yes.", [], "stop")
    assert not any("reasoning" in chunk["choices"][0]["delta"] for chunk in chunks)


def test_tokens_of_reasoning_are_counted_without_tags() -> None:
    router = router_of("", template=THINK)
    router.runs = [("<think>Hm.</think>", [5000, 172, 209, 146, 5001]), ("Yes.", [189, 201])]
    tokenizer = router.pool.tokenizer
    tokenizer.convert_ids_to_tokens = lambda one: (
        {5000: "<think>", 5001: "</think>"}.get(one)
        or FakeTokenizer.convert_ids_to_tokens(tokenizer, one)
    )
    details = answer_of(router)["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == 3


@pytest.mark.parametrize(
    ("template", "server"), [(THINK, {"reasoning_parser": "none"}), ("{{ messages }}", {})]
)
def test_reasoning_stays_content_where_it_is_not_known(template: str, server: Any) -> None:
    text = "<think>Hm.</think>Yes."
    [choice] = answer_of(router_of(text, server=server, template=template))["choices"]
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}


def test_calls_stay_content_where_none_are_asked_for() -> None:
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        message = answer_of(router_of(ANALYSIS + CALL, template=HARMONY), **more)["choices"][0][
            "message"
        ]
        assert (message["content"], message["reasoning"]) == ('{"x": 1}', "Hm.")
        assert "tool_calls" not in message
    server = {"tool_parser": "none"}
    answer = answer_of(router_of(ANALYSIS + CALL, server=server, template=HARMONY), tools=TOOLS)
    assert answer["choices"][0]["message"]["content"] == '{"x": 1}'


@pytest.mark.parametrize(("end", "ends"), [("", "stop"), ("", "eos"), ("<|endoftext|>", "eos")])
def test_a_whole_call_needs_no_end_tag(end: str, ends: FinishReason) -> None:
    text = ANALYSIS + CALL.removesuffix("<|call|>") + end
    [choice] = answer_of(router_of(text, ends=ends, template=HARMONY), tools=TOOLS)["choices"]
    assert calls_of(choice["message"]) == [("f", '{"x": 1}')]
    assert choice["finish_reason"] == "tool_calls"


def test_a_function_that_is_not_offered_is_not_called() -> None:
    text = ANALYSIS + CALL.replace(".f", ".nosuch")
    [choice] = answer_of(router_of(text, template=HARMONY), tools=TOOLS)["choices"]
    assert choice["message"]["content"] == '{"x": 1}'
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


def test_the_answer_goes_on_in_the_channel_that_the_prompt_ends_in() -> None:
    def said(template: str, before: str, text: str = "Hm.</think>Yes.") -> tuple[Any, Any]:
        messages = [*CHAT["messages"], {"role": "assistant", "content": before}]
        fields = {"continue_final_message": True, "add_generation_prompt": False}
        router = router_of(text, template=template)
        message = answer_of(router, messages=messages, **fields)["choices"][0]["message"]
        return message.get("reasoning"), message["content"]

    template = "{{ messages[-1].content }}{# </think> #}"
    assert said(template, "<think>First") == ("Hm.", "Yes.")
    assert said(template, "First") == (None, "Hm.</think>Yes.")
    assert said(template, "First", "<think>Hm.") == (None, "<think>Hm.")
    harmony = "<|start|>{{ messages[-1].content }}{# <|channel|><|message|> #}"
    assert said(harmony, "First") == (None, "Hm.</think>Yes.")


@pytest.mark.parametrize("template", [HARMONY, THINK])
def test_structures_and_forced_calls_come_behind_the_reasoning(template: str) -> None:
    router = router_of(ANALYSIS + FINAL, template=template)
    answer_of(router, response_format={"type": "json_object"}, tools=TOOLS)
    structure = router.calls[-1][1].structure
    assert structure.kind == "json_object"
    assert "@body" in structure.around
    answer_of(router, tools=TOOLS, tool_choice="required")
    structure = router.calls[-1][1].structure
    assert structure.source.startswith("start: call" + ("\n" if template == HARMONY else ""))
    assert "thought" in structure.around
    assert '"<|channel|>final' not in structure.around


def test_a_clients_reasoning_reaches_templates_under_their_names() -> None:
    template = (
        "{% for one in messages %}{{ one.reasoning_content }}|{{ one.thinking }};{% endfor %}"
        "{{ '<tool_call>' }}"
    )
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    router = router_of("Yes.", template=template)
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "reasoning": "Hm.", "tool_calls": [call]},
        {"role": "assistant", "reasoning": "Hm.", "content": "So.", "tool_calls": [call]},
    ]
    answer_of(router, messages=messages)
    prompt = router.pool.tokenizer.decode(router.calls[-1][0])
    assert prompt == "|;Hm.|Hm.;Hm.|;<tool_call>"
