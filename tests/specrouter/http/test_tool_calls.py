"""Tool calls in chats, in front of a fake router: answers, streams, refusals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from tokenizers import AddedToken

from specrouter.request.output import FinishReason
from tests.specrouter.fake_router import FakeRouter, FakeTokenizer
from tests.specrouter.http.client import answer_of, post, refusal, stream_of

PATH = "/v1/chat/completions"
F = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {}}}}}
G = {"type": "function", "function": {"name": "g"}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": [F, G]}
TEMPLATE = "{{ messages[0].content }}{# <tool_call> #}"
TEXT = (
    'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
)
CALLS = [("f", '{"x": 1}'), ("g", "{}")]


def router_of(text: str, size: int = 7, template: str | None = TEMPLATE, **more: Any) -> FakeRouter:
    """Says this, `size` characters, which are a token each, at a time."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    runs = [(piece, [100 + ord(character) for character in piece]) for piece in pieces]
    more = {"ends": "eos", **more}
    router = FakeRouter(runs=runs, tokenizer=FakeTokenizer(template), **more)
    router.max_request_tokens = 1000
    return router


def choice_of(router: FakeRouter, **fields: Any) -> dict[str, Any]:
    [choice] = answer_of(router, PATH, {**CHAT, **fields})["choices"]
    found: dict[str, Any] = choice
    return found


def calls_of(message: dict[str, Any]) -> list[tuple[str, str]]:
    calls = message["tool_calls"]
    assert all(set(call) == {"id", "type", "function"} for call in calls)
    assert {call["type"] for call in calls} == {"function"}
    assert len({call["id"] for call in calls}) == len(calls)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def joined(chunks: Iterable[dict[str, Any]]) -> tuple[str, list[tuple[str, str]], str]:
    """The content, the calls and the reason of a stream's only choice."""
    content, calls, reasons = "", dict[int, list[str]](), list[str]()
    for chunk in chunks:
        [choice] = chunk["choices"]
        content += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            function = call["function"]
            if call["index"] not in calls:
                assert call["index"] == len(calls)
                assert set(call) == {"index", "id", "type", "function"}
                calls[call["index"]] = [function["name"], ""]
            else:
                assert set(call) == {"index", "function"}
                assert set(function) == {"arguments"}
            calls[call["index"]][1] += function["arguments"]
        if choice["finish_reason"]:
            reasons.append(choice["finish_reason"])
    [reason] = reasons
    return content, [(name, arguments) for name, arguments in calls.values()], reason


@pytest.mark.parametrize(
    ("text", "content", "calls", "reason"),
    [
        (TEXT, "Let me see.", CALLS, "tool_calls"),
        (TEXT.partition("\n")[2], None, CALLS, "tool_calls"),
        (" A <b> c.\n", " A <b> c.\n", [], "stop"),
    ],
)
def test_calls_are_read_out_of_what_the_family_writes_whole_and_streamed(
    text: str, content: str | None, calls: list[tuple[str, str]], reason: str
) -> None:
    choice = choice_of(router_of(text))
    assert choice["message"]["content"] == content
    assert (calls_of(choice["message"]) if calls else []) == calls
    assert ("tool_calls" in choice["message"], choice["finish_reason"]) == (bool(calls), reason)
    chunks = stream_of(router_of(text, 3), CHAT, PATH)
    assert joined(chunks) == (content or "", calls, reason)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert ["role" in delta for delta in deltas] == [True] + [False] * (len(deltas) - 1)


@pytest.mark.parametrize(
    ("template", "tags", "shown_without_calls"),
    [
        (TEMPLATE, ("<tool_call>", "</tool_call>"), ()),
        ("{# <|start|><|channel|><|message|> #}", ("<|channel|>", "<|call|>"), (0,)),
    ],
)
def test_tags_that_are_special_tokens_are_looked_for_in_the_text(
    template: str, tags: tuple[str, str], shown_without_calls: tuple[int, ...]
) -> None:
    router = router_of(TEXT, template=template)
    tokens = [(tags[0], True), (tags[1], False), ("<|im_end|>", True)]
    router.pool.tokenizer.added_tokens_decoder = {
        number: AddedToken(text, special=is_special)
        for number, (text, is_special) in enumerate(tokens)
    }
    for choice, shown in (("auto", (0,)), ("required", (0,)), ("none", shown_without_calls)):
        choice_of(router, tool_choice=choice)
        assert router.calls[-1][1].shown_special_token_ids == shown


@pytest.mark.parametrize(
    ("more", "fields"),
    [
        ({}, {"tools": None}),
        ({}, {"tool_choice": "none"}),
        ({"template": "{{ messages[0].content }}"}, {}),
        ({"server": {"tool_parser": "none"}}, {}),
        ({"server": {"tool_parser": "llama3_json"}}, {}),
        ({}, {"response_format": {"type": "json_object"}}),
    ],
)
def test_calls_are_not_read_unless_asked_for_and_known(
    more: dict[str, Any], fields: dict[str, Any]
) -> None:
    message = choice_of(router_of(TEXT, **more), **fields)["message"]
    assert message["content"] == TEXT
    assert "tool_calls" not in message
    llama = router_of(
        '{"name": "f", "parameters": {"x": 1}}', server={"tool_parser": "llama3_json"}
    )
    assert calls_of(choice_of(llama)["message"]) == CALLS[:1]


def test_one_call_where_no_more_are_wanted_or_the_template_takes_no_more_in_a_turn() -> None:
    choice = choice_of(router_of(TEXT), parallel_tool_calls=False)
    assert calls_of(choice["message"]) == CALLS[:1]
    template = TEMPLATE + "{# This model only supports single tool-calls at once! #}"
    assert calls_of(choice_of(router_of(TEXT, template=template))["message"]) == CALLS[:1]
    router = router_of(TEXT.partition("\n")[2], template=template)
    choice_of(router, tool_choice="required")
    assert router.calls[0][1].structure.source.startswith("start: call\n")


NAMED = {"type": "function", "function": {"name": "f"}}
FORCED = TEXT.partition("\n")[2]  # nothing but calls
CUTS: list[tuple[str, list[tuple[str, str]]]] = [
    (FORCED[: FORCED.index("1}")], [("f", '{"x": ')]),
    (FORCED[: FORCED.index('{"x"')], [("f", "")]),
    (FORCED.partition("}}")[0] + "}", [("f", '{"x": 1}')]),
    (FORCED[: FORCED.rindex("}")], [("f", '{"x": 1}'), ("g", "{}")]),
]


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
@pytest.mark.parametrize("ends", ["length", "stop"])
@pytest.mark.parametrize(("cut", "calls"), CUTS)
def test_a_call_that_is_cut_in_two_is_told_with_what_there_is_of_it(
    cut: str, calls: list[tuple[str, str]], ends: FinishReason, choice: Any
) -> None:
    calls = calls[:1] if choice is NAMED else calls
    found = choice_of(router_of(cut, ends=ends), tool_choice=choice)
    assert calls_of(found["message"]) == calls
    assert found["finish_reason"] == ends
    streamed = stream_of(router_of(cut, 3, ends=ends), {**CHAT, "tool_choice": choice}, PATH)
    assert joined(streamed) == ("", calls, ends)


def test_choices_are_read_apart() -> None:
    chunks = stream_of(router_of(TEXT), {**CHAT, "n": 2}, PATH)
    for index in range(2):
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert joined(own) == ("Let me see.", CALLS, "tool_calls")


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"f", "g"}), ({"type": "function", "function": {"name": "g"}}, {"g"})],
)
@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_a_forced_answer_has_the_form_of_calls(
    choice: Any, names: set[str], template: str | None
) -> None:
    router = router_of(TEXT.partition("\n")[2], template=template)
    found = choice_of(router, tool_choice=choice)
    structure = router.calls[0][1].structure
    assert structure.kind == "grammar"
    assert {name for name in ("f", "g") if f'\\"{name}\\"' in structure.source} == names
    assert found["message"]["content"] is None
    assert found["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(("choice", "calls"), [("required", []), (NAMED, [("f", "")])])
def test_a_forced_answer_that_is_cut_before_its_name_has_it_where_there_is_but_one(
    choice: Any, calls: list[tuple[str, str]]
) -> None:
    router = router_of('<tool_call>\n{"na', ends="length")
    found = choice_of(router, tool_choice=choice)
    assert found["message"]["content"] is None
    assert (calls_of(found["message"]) if calls else []) == calls
    assert found["finish_reason"] == "length"
    assert joined(stream_of(router, {**CHAT, "tool_choice": choice}, PATH)) == ("", calls, "length")


def test_what_a_forced_answer_says_behind_its_calls_is_left_out() -> None:
    router = router_of(FORCED + "\nIt ")
    choice = choice_of(router, tool_choice="required")
    assert (choice["message"]["content"], calls_of(choice["message"])) == (None, CALLS)
    assert choice["finish_reason"] == "tool_calls"
    assert router.calls[0][1].structure.open_ended


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [F, F]}, "tools[1].function.name"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
    ],
)
def test_bad_tools_are_a_400_that_names_the_place(fields: dict[str, Any], param: str) -> None:
    router = router_of(TEXT)
    response = post(router, {**CHAT, **fields}, PATH)
    assert (response.status_code, refusal(response)["param"]) == (400, param)
    assert router.calls == []


def test_the_function_whose_schema_cannot_be_compiled_is_named() -> None:
    router = router_of(TEXT, refuses_structures=['"x"'])
    response = post(router, {**CHAT, "tools": [G, F], "tool_choice": "required"}, PATH)
    assert refusal(response)["param"] == "tools[1].function.parameters"
    assert "cannot be compiled" in refusal(response)["message"]
    both = router_of(TEXT, refuses_structures=["start"])
    response = post(both, {**CHAT, "tool_choice": "required"}, PATH)
    assert refusal(response)["param"] == "tools"
