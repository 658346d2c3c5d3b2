"""`POST /v1/chat/completions` in front of a fake router: templates, answers, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from modelpool.errors import ConfigError
from specrouter import SamplingParams, Speculation
from specrouter.http.openai_fields import ChatRequest
from specrouter.request import fields as bodies
from tests.specrouter.fake_router import FakeRouter, FakeTokenizer
from tests.specrouter.http.client import UNASKED, answer_of, app_of, cases, post, refusal, stream_of

PATH = "/v1/chat/completions"
USER: dict[str, Any] = {"role": "user", "content": "hi"}
CHAT: dict[str, Any] = {"messages": [USER]}
# Shows all that it is given, and refuses a role.
TEMPLATE = (
    "<s>{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{{ m.colour }}{{ m.tool_calls }}{% endfor %}"
    "{{ tools }}{{ documents }}{{ reasoning_effort }}{{ mood }}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def chat(router: FakeRouter | None = None, **fields: Any) -> dict[str, Any]:
    return answer_of(router or FakeRouter(), PATH, {**CHAT, **fields})


def chunks(**fields: Any) -> list[dict[str, Any]]:
    return stream_of(FakeRouter(), {**CHAT, **fields}, PATH)


def asked(**fields: Any) -> SamplingParams:
    router = FakeRouter()
    chat(router, **fields)
    params: SamplingParams = router.calls[0][1]
    return params


def prompt_of(messages: list[dict[str, Any]], template: str | None = None, **fields: Any) -> str:
    """The text that the router reads."""
    tokenizer = FakeTokenizer(template)
    router = FakeRouter(tokenizer=tokenizer)
    router.max_request_tokens = 1000
    chat(router, messages=messages, **fields)
    return tokenizer.decode(router.calls[0][0])


# Prompts


def test_a_tokenizer_without_a_template_gets_a_plain_one_and_its_special_tokens() -> None:
    messages = [{"role": "system", "content": "Be kind."}, USER]
    assert prompt_of(messages) == "<s>System: Be kind.\n\nUser: hi\n\nAssistant:"


def test_a_templates_text_gets_no_special_tokens_a_second_time() -> None:
    tokenizer = FakeTokenizer("{{ '<s>' }}{{ messages[0].content }}")
    router = FakeRouter(tokenizer=tokenizer)
    chat(router)
    assert tokenizer.begin not in router.calls[0][0]  # the fake reads it as three characters


def test_the_configured_template_goes_before_the_tokenizers(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("configured {{ messages[0].content }}")
    router = FakeRouter(tokenizer=FakeTokenizer("own"), server={"chat_template": file})
    chat(router)
    assert router.pool.tokenizer.decode(router.calls[0][0]) == "configured hi"


@pytest.mark.parametrize("source", ["{% for %}", "{{ nothing.at.all }}", b"\xff"])
def test_a_file_that_is_no_template_is_an_error_of_the_configuration(
    source: str | bytes, tmp_path: Path
) -> None:
    file = tmp_path / "chat.jinja"
    file.write_bytes(source.encode() if isinstance(source, str) else source)
    with pytest.raises(ConfigError, match=r"server\.chat_template"):
        app_of(FakeRouter(server={"chat_template": file}))


@pytest.mark.parametrize(
    ("template", "role"),
    [("{{ messages[0].role }}", "system"), ("{# developer #}{{ messages[0].role }}", "developer")],
)
def test_a_developer_is_the_system_unless_the_template_knows_one(template: str, role: str) -> None:
    assert prompt_of([{"role": "developer", "content": "a"}], template) == role


def test_where_the_prompt_ends_can_be_chosen_and_parts_are_lines_of_one_text() -> None:
    parts = [{"type": "text", "text": "I"}, {"type": "text", "text": "am"}]
    messages = [USER, {"role": "assistant", "content": parts}]
    assert prompt_of(messages, continue_final_message=True).endswith("Assistant: I\nam")
    assert prompt_of([USER], add_generation_prompt=False).endswith("User: hi")


def test_tools_variables_and_calls_reach_the_template() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    text = prompt_of(messages, TEMPLATE, tools=tools, chat_template_kwargs={"mood": "calm"})
    assert "'arguments': {'x': 1}" in text
    assert "'type': 'function'" in text
    assert text.endswith("calm[assistant]")
    assert "'type': 'function'" not in prompt_of([USER], TEMPLATE, tools=tools, tool_choice="none")


def test_a_template_that_writes_tools_and_calls_as_json_reads_all_of_their_keys() -> None:
    template = "{{ tools | tojson }}{% for m in messages %}{{ m.tool_calls | tojson }}{% endfor %}"
    function = {"name": "f", "arguments": {}, "colour": "red"}
    messages = [{"role": "assistant", "tool_calls": [{"function": function}]}]
    tools = [{"type": "function", "function": {"name": "f", "examples": ["f()"]}}]
    text = prompt_of(messages, template, tools=tools)
    assert '"examples": ["f()"]' in text
    assert '"colour": "red"' in text


@pytest.mark.parametrize("name", ["turns", "variables", "conversation", "tokenizer", "kwargs"])
def test_a_variable_may_have_any_name_that_the_service_does_not_give(name: str) -> None:
    template = f"{{{{ {name} }}}} {{{{ messages[0].content }}}}"
    assert prompt_of([USER], template, chat_template_kwargs={name: 1}) == "1 hi"


def test_documents_and_the_reasoning_effort_reach_the_template() -> None:
    text = prompt_of([USER], TEMPLATE, documents=[{"text": "a"}], reasoning_effort="high")
    assert text.endswith("[{'text': 'a'}]high[assistant]")
    kwargs = {"reasoning_effort": "low"}
    assert "low" in prompt_of([USER], TEMPLATE, chat_template_kwargs=kwargs)
    assert "low" not in prompt_of(
        [USER], TEMPLATE, chat_template_kwargs=kwargs, reasoning_effort="high"
    )
    unless_asked = "{{ reasoning_effort is defined }}"
    assert prompt_of([USER], unless_asked, reasoning_effort=None) == "False"


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}"])
def test_special_tokens_are_added_or_left_out_where_asked(template: str | None) -> None:
    assert prompt_of([USER], template, add_special_tokens=True).startswith("<s>")
    assert not prompt_of([USER], template, add_special_tokens=False).startswith("<s>")


# How DeepSeek's templates read calls: a content that is none, arguments between other texts.
_CALLS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m['content'] is none %}{% for call in m['tool_calls'] %}"
    "{{ '<call>' + call['function']['name'] + call['function']['arguments'] + '</call>' }}"
    "{% endfor %}{% else %}{{ '<said>' + m['content'] }}{% endif %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [('{"x":1}', '{"x":1}'), ({"x": "é"}, '{"x": "é"}'), ("", "{}"), (None, "{}")],
)
@pytest.mark.parametrize("content", [{"content": None}, {}])
def test_a_template_that_puts_arguments_between_texts_gets_text(
    arguments: Any, shown: str, content: dict[str, Any]
) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "tool_calls": [call], **content}]
    assert prompt_of(messages, _CALLS) == f"<call>f{shown}</call>"


def test_a_content_beside_calls_that_is_null_is_none_to_templates_that_need_it_alone() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    needed = "{{ '' if messages[1].content is none else raise_exception('a content') }}{}"
    assert prompt_of(messages, needed) == "{}"
    assert prompt_of(messages, "{{ messages[1].content is defined }}") == "False"


@pytest.mark.parametrize("content", [{"content": None}, {}])
def test_an_answer_that_ended_while_it_thought_is_taken_back(content: dict[str, Any]) -> None:
    messages = [USER, {"role": "assistant", "reasoning_content": "hm", **content}, USER]
    template = "{{ messages[1].content + '|' + messages[1].reasoning_content }}"
    assert prompt_of(messages, template) == "|hm"


@pytest.mark.parametrize(
    "arguments", [{"arguments": text} for text in ("", " ", None, "{}")] + [{}]
)
def test_a_call_without_arguments_has_an_empty_object_of_them(arguments: dict[str, Any]) -> None:
    call = {"id": "1", "function": {"name": "f", **arguments}}
    text = prompt_of([USER, {"role": "assistant", "tool_calls": [call]}], TEMPLATE)
    assert "{'name': 'f', 'arguments': {}}" in text


# As clients send back what they made of answers, or send to any server.
_OF_CLIENTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"role": "assistant", "content": "a"}, {"refusal": None, "audio": None, "annotations": []}),
    ({"role": "assistant", "content": "a"}, {"function_call": None, "tool_calls": None, "id": "b"}),
    ({"role": "assistant", "content": "a"}, {"parsed": {"c": 1}, "provider_specific_fields": {}}),
    ({"role": "assistant", "content": "a"}, {"reasoning_content": "hm", "reasoning": "hm"}),
    ({"role": "assistant", "content": "a"}, {"content": None, "refusal": "a"}),
    ({"role": "assistant", "content": "a"}, {"content": "", "refusal": "a"}),
    ({"role": "assistant", "content": "a"}, {"refusal": ""}),
    ({**USER}, {"cache_control": {"type": "ephemeral"}}),
    (
        {**USER},
        {"content": [{"type": "text", "text": "hi", "cache_control": {}, "annotations": []}]},
    ),
]


@pytest.mark.parametrize(("message", "more"), _OF_CLIENTS)
def test_what_cannot_change_an_answer_is_ignored(
    message: dict[str, Any], more: dict[str, Any]
) -> None:
    assert prompt_of([{**message, **more}]) == prompt_of([message])


def test_what_cannot_change_an_answer_is_ignored_beside_a_call_too() -> None:
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {"a": 1}}
    call = {"id": "1", "index": 0, "type": "function", "function": function}
    prompt_of([USER, {"role": "assistant", "tool_calls": [call]}])


def test_no_calls_are_none_for_the_template() -> None:
    template = "{% for m in messages %}{{ m.tool_calls is defined }}{% endfor %}"
    none: tuple[Any, ...] = ([], None)
    said = [{"role": "assistant", "content": "a", "tool_calls": calls} for calls in none]
    assert prompt_of(said, template) == "FalseFalse"


def test_a_refusal_of_an_earlier_answer_is_its_text() -> None:
    template = "{{ messages[0].content }}"
    parts = [{"type": "refusal", "refusal": "No."}]
    assert prompt_of([{"role": "assistant", "content": parts}], template) == "No."


# Predicted outputs


@pytest.mark.parametrize(
    "content", ["ab", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]]
)
def test_a_prediction_is_handed_to_the_drafters(content: Any) -> None:
    prediction = {"type": "content", "content": content}
    router = FakeRouter()
    chat(router, prediction=prediction)
    chat(router, prediction=prediction, speculation={"depth": 3})
    chat(router, prediction=prediction, speculation="off")
    assert [speculation for *_, speculation in router.calls] == [
        Speculation(prediction="ab"),
        Speculation(depth=3, prediction="ab"),
        "off",
    ]


# Answers


def test_an_answer_is_a_message_of_the_assistant() -> None:
    answer = chat()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": " ab\nc é", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]


def test_what_fits_is_the_limit_unless_one_is_given() -> None:
    room = 64 - len(FakeTokenizer()("User: hi\n\nAssistant:")["input_ids"])
    assert asked() == SamplingParams(max_new_tokens=room, temperature=1.0)
    assert asked(max_tokens=3).max_new_tokens == 3
    assert asked(max_completion_tokens=4, max_tokens=3).max_new_tokens == 4


def test_fields_that_are_refused_may_ask_for_nothing() -> None:
    names = [name for name, _, _ in bodies._refusals(ChatRequest)]
    assert {"chat_template", "logits_processors", "functions"} <= set(names)
    for nothing in (None, False):
        assert asked(**dict.fromkeys(names, nothing)) == asked()
    neutral = {"modalities": ["text"], "verbosity": "medium", "thinking_token_budget": -1}
    assert asked(**neutral, functions=[], function_call="none") == asked()


def test_logprobs_have_the_bytes_of_each_token() -> None:
    [choice] = chat(logprobs=True, top_logprobs=1)["choices"]
    top = [{"token": " a", "logprob": -0.25, "bytes": [32, 97]}]
    *others, last = choice["logprobs"]["content"]
    own = {"token": " é", "logprob": -2.0, "bytes": [32, 195, 169]}
    assert (len(others), last) == (3, {**own, "top_logprobs": top})


def test_logprobs_alone_bring_no_others() -> None:
    [choice] = chat(logprobs=True)["choices"]
    assert [one["top_logprobs"] for one in choice["logprobs"]["content"]] == [[]] * 4
    assert asked(logprobs=False, top_logprobs=0).logprobs is None


def test_a_stream_names_the_role_once_and_ends_with_a_reason() -> None:
    found = chunks(stream_options={"include_usage": True})
    *deltas, last = found
    assert {chunk["object"] for chunk in found} == {"chat.completion.chunk"}
    assert [chunk["choices"][0]["delta"] for chunk in deltas] == [
        {"role": "assistant", "content": " a"},
        {"content": "b\nc"},
        {"content": " é"},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in deltas] == [None, None, "length"]
    assert (last["choices"], last["usage"]) == ([], chat()["usage"])


def test_each_choice_of_a_stream_has_its_role() -> None:
    parts = [chunk["choices"][0] for chunk in chunks(n=3)]
    assert sorted(part["index"] for part in parts if "role" in part["delta"]) == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_ids_and_the_prompts_logprobs_are_returned_where_asked(stream: bool) -> None:
    fields: dict[str, Any] = {"return_token_ids": True, "prompt_logprobs": 0}
    first = chunks(**fields)[0] if stream else chat(**fields)
    assert first["prompt_token_ids"][0] == FakeTokenizer.begin
    assert len(first["prompt_logprobs"]) == len(first["prompt_token_ids"])
    assert first["choices"][0]["token_ids"] == ([5] if stream else [5, 6, 7, 8])


# Refusals


def said(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", **message}]}


def called(call: dict[str, Any]) -> dict[str, Any]:
    return said(role="assistant", tool_calls=[call])


def function(**more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **more}}


CALL = "messages[0].tool_calls[0].function"
BAD_VALUES: dict[str, Sequence[Any]] = {
    "messages": (None, []),
    "chat_template_kwargs": tuple(
        {name: 1} for name in ("tokenize", "chat_template", "self", "conversations")
    ),
    "modalities": (["text", "audio"],),
    "verbosity": ("low",),
    "web_search_options": ({},),
    "thinking_token_budget": (0,),
    "prediction": ("a",),
    "max_tokens": (0,),
    "top_logprobs": (2,),  # without logprobs
    "stream_options": ({},),
}
BAD: list[tuple[dict[str, Any], str]] = [
    *cases(BAD_VALUES),
    ({"messages": [3]}, "messages[0]"),
    (said(role="robot", content="a"), "messages[0].role"),
    ({"messages": [USER, {"role": "assistant"}]}, "messages[1].content"),
    (said(content="\ud800"), "messages[0].content"),
    (said(content=[{"type": "image_url", "image_url": {}}]), "messages[0].content[0]"),
    (said(content=[{"type": "text"}]), "messages[0].content[0].text"),
    (said(content=[{"type": "refusal"}]), "messages[0].content[0].refusal"),
    *(
        (called({"function": {"name": "f", "arguments": bad}}), f"{CALL}.arguments")
        for bad in ("{", "[1]", "null", "3", [1], 0, True)
    ),
    *((called({"function": {"name": bad}}), f"{CALL}.name") for bad in (None, "", 3)),
    (called({"function": {"arguments": "{}"}}), f"{CALL}.name"),
    (called({}), CALL),
    (called({**function(), "type": "custom"}), "messages[0].tool_calls[0].type"),
    ({"messages": [{**USER, "tool_calls": [function()]}]}, "messages[0].tool_calls"),
    (said(role="assistant", content="a", refusal="b"), "messages[0].refusal"),
    (said(role="user", refusal="b"), "messages[0].refusal"),
    # What would be dropped
    (said(role="assistant", function_call={"name": "f"}), "messages[0].function_call"),
    (said(content="a", colour="red"), "messages[0].colour"),
    (said(content=[{"type": "text", "text": "a", "colour": 1}]), "messages[0].content[0].colour"),
    (called({**function(), "colour": 1}), "messages[0].tool_calls[0].colour"),
    (called(function(argument="{}")), f"{CALL}.argument"),
    ({"tools": [{**function(), "parameters": {}}]}, "tools[0].parameters"),
    ({"tools": [function(params={})]}, "tools[0].function.params"),
    ({"tools": [function()], "tool_choice": {**function(), "colour": 1}}, "tool_choice.colour"),
    ({"tools": [function()], "tool_choice": function(a=1)}, "tool_choice.function.a"),
    ({"documents": [{"text": "a"}]}, "documents"),
    ({"chat_template_kwargs": {"thinking": False}}, "chat_template_kwargs.thinking"),
    ({"prediction": {"type": "content", "content": "a", "text": "b"}}, "prediction.text"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
    ({"prediction": {"type": "content"}}, "prediction.content"),
    (
        {"prediction": {"type": "content", "content": [{"type": "image_url"}]}},
        "prediction.content[0]",
    ),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_bad_field_is_a_400_that_names_it(fields: dict[str, Any], param: str) -> None:
    response = post(UNASKED, {**CHAT, **fields}, PATH)
    assert (response.status_code, refusal(response)["param"]) == (400, param)
    assert UNASKED.calls == []


@pytest.mark.parametrize(
    "message", [{"role": "tool", "content": "a"}, {**USER, "colour": "\ud800"}]
)
def test_what_the_template_cannot_take_is_a_400(message: dict[str, Any]) -> None:
    router = FakeRouter(tokenizer=FakeTokenizer(TEMPLATE))
    response = post(router, {"messages": [message]}, PATH)
    assert (response.status_code, refusal(response)["param"]) == (400, "messages")
