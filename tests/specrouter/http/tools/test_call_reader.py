"""Calls read out of texts: what is one, what stays content, and that cuts make no difference."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from specrouter.http.reasoning.answer_reader import AnswerReader, News
from specrouter.http.tools.call_reader import CallReader
from specrouter.http.tools.formats import HERMES, LLAMA3_JSON, ToolFormat

NAMES = ("f", "get_weather")
Read = tuple[str, list[tuple[str, str]]]  # the content, and names with arguments


def joined(news: Sequence[News]) -> Read:
    """As a client joins what it is told."""
    content, calls = "", list[tuple[str, str]]()
    for piece in news:
        content += piece.content
        for call in piece.calls:
            if call.name is not None:
                assert call.index == len(calls), "calls begin in order"
                calls.append((call.name, ""))
            name, arguments = calls[call.index]
            calls[call.index] = (name, arguments + call.arguments)
    return content, calls


def read(form: ToolFormat, text: str, cuts: Sequence[int] = (), **options: Any) -> Read:
    reader = AnswerReader(None, CallReader(form, NAMES), **options)
    places = [0, *sorted(cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    return joined([*(reader.read(piece) for piece in pieces), reader.read("", ends=True)])


def call(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def tagged(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in calls)


F = call("f", '{"x": 1}')
TRICKY = r'{"a": "}\"]</tool_call>{", "b": [{"c": {}}, null, -1.5e3], "é": "\u00e9\\"}'

HERMES_TEXTS: list[tuple[str, Read]] = [
    ("", ("", [])),
    ("Just text.", ("Just text.", [])),
    (" a < b\n\n", (" a < b\n\n", [])),
    (tagged(F), ("", [("f", '{"x": 1}')])),
    (tagged(F, call("g", "{}")), ("", [("f", '{"x": 1}'), ("g", "{}")])),
    (f"Let me see.\n\n{tagged(F)}", ("Let me see.", [("f", '{"x": 1}')])),
    (f"{tagged(F)}\n", ("", [("f", '{"x": 1}')])),
    (f"{tagged(F)}\nDone. ", ("\nDone. ", [("f", '{"x": 1}')])),
    (tagged(call("f", TRICKY)), ("", [("f", TRICKY)])),
    ('<tool_call>{"name":"f","arguments":{}}</tool_call>', ("", [("f", "{}")])),
    (f"<tool_call>\n{F}", ("", [("f", '{"x": 1}')])),  # the end tag is missing
    (f"<tool_call>\n{F}\n<tool_call>\n{F}", ("", [("f", '{"x": 1}')] * 2)),
    # The members in another order: read as a whole (test_call_object).
    ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', ("", [("f", '{"x": 1}')])),
    ('<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")])),
    ('<tool_call>{"name": "f", "arguments": {}, "id": 3}</tool_call>', ("", [("f", "{}")])),
    # A brace too few: the arguments are whole.
    ('<tool_call>{"name": "f", "arguments": {"x": 1}</tool_call>', ("", [("f", '{"x": 1}')])),
    # No JSON: as the model wrote it, to the end tag.
    ('<tool_call>{"name": "f", "arguments": {"x": <1}}</tool_call>b', ("b", [("f", '{"x": <1}}')])),
    ('<tool_call>{"name": "f", "arguments": {"x": 1]', ("", [("f", '{"x": 1]')])),
    # No calls.
    ("<tool_call>f(1)</tool_call>", ("<tool_call>f(1)</tool_call>", [])),
    ("<tool_call>{}</tool_call>", ("<tool_call>{}</tool_call>", [])),
    ('<tool_call>{"name": 3}', ('<tool_call>{"name": 3}', [])),
    ('<tool_call>{"name": "\\ud800"}', ('<tool_call>{"name": "\\ud800"}', [])),
    ('<tool_call>{"name": "f", "arg', ('<tool_call>{"name": "f", "arg', [])),
    ("<tool_call><tool_call>" + F, ("<tool_call>", [("f", '{"x": 1}')])),
    ("a <tool_cal", ("a <tool_cal", [])),
    (F, (F, [])),
]
LLAMA = call("f", '{"x": 1}', "parameters")
LLAMA_TEXTS: list[tuple[str, Read]] = [
    ("", ("", [])),
    (" Just text; more {}", (" Just text; more {}", [])),
    (LLAMA, ("", [("f", '{"x": 1}')])),
    (f"<|python_tag|>{LLAMA}", ("", [("f", '{"x": 1}')])),
    (f"\n{LLAMA}\n", ("", [("f", '{"x": 1}')])),
    (f"{LLAMA}; {LLAMA}", ("", [("f", '{"x": 1}')] * 2)),
    (f"{LLAMA}\n{F}", ("", [("f", '{"x": 1}')] * 2)),
    (f"{LLAMA} Done.", (" Done.", [("f", '{"x": 1}')])),
    (f"Let me see. <|python_tag|>{LLAMA}", ("Let me see.", [("f", '{"x": 1}')])),
    (call("f", TRICKY, "parameters"), ("", [("f", TRICKY)])),
    ('{"type": "function", "name": "f", "parameters": {"x": 1}}', ("", [("f", '{"x": 1}')])),
    # Answers that happen to be JSON.
    ('{"name": "Anna", "parameters": {"x": 1}}', ('{"name": "Anna", "parameters": {"x": 1}}', [])),
    ('{"name": "f"}', ('{"name": "f"}', [])),
    ('{"a": {"b": 1}} ', ('{"a": {"b": 1}} ', [])),
    ('{"a": ', ('{"a": ', [])),
    ("<|python_tag|>f.call(x=1)", ("<|python_tag|>f.call(x=1)", [])),
    (f"See: {LLAMA}", (f"See: {LLAMA}", [])),
]
TEXTS = [(HERMES, *one) for one in HERMES_TEXTS] + [(LLAMA3_JSON, *one) for one in LLAMA_TEXTS]


@pytest.mark.parametrize(("form", "text", "found"), TEXTS)
def test_calls_are_told_and_all_else_is_content(form: ToolFormat, text: str, found: Read) -> None:
    assert read(form, text) == found


def test_the_same_is_told_however_a_text_is_cut() -> None:
    random_ = random.Random(7)
    for form, text, found in TEXTS:
        for _ in range(60):
            cuts = [random_.randint(0, len(text)) for _ in range(random_.randint(0, 8))]
            assert read(form, text, cuts) == found, (text, cuts)
        assert read(form, text, range(len(text))) == found


def test_the_same_is_told_of_any_text_however_it_is_cut() -> None:
    random_ = random.Random(8)
    parts = [
        "<tool_call>", "</tool_call>", "<", "</", "tool", "<|python_tag|>", "{", "}", "[", "]", '"',
        "\\", ":", ",", ";", " ", "\n", "x", "1", F, LLAMA, tagged(F), '{"name": "f", ',
        '"arguments": ', '"parameters": {', "é",
    ]  # fmt: skip
    for _ in range(2000):
        form = random_.choice((HERMES, LLAMA3_JSON))
        text = "".join(random_.choices(parts, k=random_.randint(1, 12)))
        cuts = [random_.randint(0, len(text)) for _ in range(random_.randint(1, 6))]
        options: dict[str, Any] = {
            "forced": random_.random() < 0.2,
            "max_calls": random_.choice((None, 1)),
        }
        whole, cut = read(form, text, **options), read(form, text, cuts, **options)
        assert whole == cut, (form.name, text, cuts)
        if not whole[1] and not options["forced"]:
            assert whole[0] == text  # without a call nothing is lost


def test_arguments_are_told_as_they_come() -> None:
    reader = AnswerReader(None, CallReader(HERMES, NAMES))
    assert reader.read('<tool_call>\n{"name": "f", "arg').calls == ()
    [begun] = reader.read('uments": {"x"').calls
    assert (begun.index, begun.name, begun.arguments) == (0, "f", '{"x"')
    assert reader.is_within_call
    [more] = reader.read(": 1}}\n</tool_call>").calls
    assert (more.index, more.name, more.arguments) == (0, None, ": 1}")
    assert not reader.is_within_call


def test_one_call_at_most_leaves_out_further_ones() -> None:
    assert read(HERMES, tagged(F, F), max_calls=1) == ("", [("f", '{"x": 1}')])


def test_an_answer_of_nothing_but_calls_has_no_content_though_it_be_cut() -> None:
    text = tagged(F, F)
    for end in range(len(text) + 1):
        content, calls = read(HERMES, text[:end], forced=True)
        assert content == ""
        assert all('{"x": 1}'.startswith(arguments) for _, arguments in calls)


def test_long_texts_take_little_time_for_each_character() -> None:
    text = " " * 50_000 + "<" * 50_000 + tagged(call("f", json.dumps({"x": "a" * 100_000})))
    content, [(_, arguments)] = read(HERMES, text)
    assert (len(content), len(arguments)) == (100_000, 100_009)


@pytest.mark.parametrize("form", [HERMES, LLAMA3_JSON], ids=lambda form: form.name)
def test_a_call_that_is_cut_off_within_a_string_behind_its_arguments_is_not_whole(
    form: ToolFormat,
) -> None:
    key = "arguments" if form.is_tagged else "parameters"
    begun = f"{form.tag if form.is_tagged else ''}{call('f', '{}', key)[:-1]}"
    for cut, is_within in ((', "id": "<', True), (', "id": "</tool', True), ("}<", False)):
        reader = AnswerReader(None, CallReader(form, NAMES))
        news = reader.read(begun + cut, ends=True)
        assert reader.is_within_call == is_within, cut
        assert [one.name for one in news.calls] == ["f"]
        assert not news.content or not is_within
