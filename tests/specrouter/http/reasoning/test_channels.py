"""Reasoning, content and calls of outputs, against a splitter that sees the whole text."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrouter.http.reasoning.answer_reader import AnswerReader
from specrouter.http.reasoning.formats import FORMATS, ReasoningFormat, reasoning_of
from specrouter.http.reasoning.harmony import Harmony
from specrouter.http.reasoning.think import Think
from specrouter.http.tools.call_reader import CallReader
from specrouter.http.tools.formats import HERMES
from tests.specrouter.http.tools.test_call_reader import joined

Said = tuple[str, str, list[tuple[str, str]]]
"""Reasoning, content, and calls."""

START = "<|start|>assistant"
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
HARMONY, THINK, GEMMA = Harmony(), Think("<think>", "</think>"), FORMATS["think"][1]
HARMONY_TEXTS: list[tuple[str, Said]] = [
    ("", ("", "", [])),
    (f"{ANALYSIS}Hm.<|end|>{START}{FINAL}Yes.<|return|>", ("Hm.", "Yes.", [])),
    (f"{ANALYSIS}Hm.<|end|>{START}{CALL}{{}}<|call|>", ("Hm.", "", [("f", "{}")])),
    # The recipient may stand with the role, and a type is not always marked.
    (
        ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>',
        ("", "", [("f", '{"x": 1}')]),
    ),
    (f"{CALL}{{", ("", "", [("f", "{")])),
    (f"{CALL}{{}}<|call|>{START}{CALL}[]<|call|>", ("", "", [("f", "{}"), ("f", "[]")])),
    (
        f"<|channel|>commentary<|message|>Plan.<|end|>{START}{CALL}{{}}<|call|>",
        ("", "Plan.", [("f", "{}")]),
    ),
    ("<|channel|>analysis to=browser.open code<|message|>{}<|call|>", ("{}", "", [])),
    ("<|channel|>commentary to=python<|message|>1+1<|call|>", ("1+1", "", [])),
    # What has no place in the form.
    ("Hello", ("", "Hello", [])),
    (f"{FINAL}a<|end|><|start|>userHello", ("", "aHello", [])),
    ("Hello\n<|message|>you", ("", "Hello\nyou", [])),
    ("x" * 600, ("", "x" * 600, [])),
    ("<|channel|>final hello<|return|>", ("", "final hello", [])),
    ("<|channel|>other<|message|>a", ("", "a", [])),
    (f"{ANALYSIS}a<|channel|>final<|message|>b", ("a", "b", [])),
    (f"{ANALYSIS}a{START}{FINAL}b<|constrain|>c", ("a", "bc", [])),
    (f"<|channel|>analysis{FINAL}b", ("", "b", [])),
    (f"{FINAL}a<|end|>b<|end|>", ("", "ab", [])),
    (f"{FINAL}a <|mess<|messag", ("", "a <|mess<|messag", [])),
    ("<|channel|>commentary to=functions.<|message|>a", ("", "a", [])),
    ("<|return|><|call|><|end|>", ("", "", [])),
    (CALL.replace(".f", ".nosuch") + "{}<|call|>", ("", "{}", [])),
    (f"{CALL}{{}}<|endoftext|>", ("", "", [("f", "{}")])),
    # Answers that begin, or are, what a header might go on with.
    *((text, ("", text, [])) for text in ("t", "to", "a", "use", "s", "d", "assistan")),
    *((text, ("", text, [])) for text in ("assistant", "userHello", "functions.f")),
]
THINK_TEXTS: list[tuple[str, Said]] = [
    ("", ("", "", [])),
    ("Just text.", ("", "Just text.", [])),
    ("<think>\nHm.\n</think>\n\nYes.", ("\nHm.\n", "\n\nYes.", [])),
    ("\n<think>Hm.</think>Yes.", ("Hm.", "\nYes.", [])),
    ("<think>Hm.", ("Hm.", "", [])),
    ("<think><think></think></think>", ("<think>", "</think>", [])),
    ("Yes <think>no</think>", ("", "Yes <think>no</think>", [])),
    ("</think> <think>a</thi", ("", "</think> <think>a</thi", [])),
    ("<think>a</thi", ("a</thi", "", [])),
    ("<think>a</think><think>b</think>", ("a", "<think>b</think>", [])),
    (
        '<think>a</think>\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
        ("a", "", [("f", '{"x": 1}')]),
    ),
    (
        '<think><tool_call>{"name": "f", "arguments": {}}</tool_call>',
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "", []),
    ),
]
TEXTS: list[tuple[ReasoningFormat, str, str, Said]] = [
    *((HARMONY, START, *one) for one in HARMONY_TEXTS),
    *((THINK, "", *one) for one in THINK_TEXTS),
    (THINK, "<think>", "\nHm.</think>Yes.", ("\nHm.", "Yes.", [])),
    (THINK, "<think>", "Hm.", ("Hm.", "", [])),
    (THINK, "</think>", "<think>Hm.", ("", "<think>Hm.", [])),
    (HARMONY, FINAL, "Yes.<|return|>", ("", "Yes.", [])),
    (HARMONY, "<|start|>user<|message|>hi<|end|>", f"{START}{FINAL}Yes.", ("", "Yes.", [])),
    (GEMMA, "", "<|channel>thought\nHm.<channel|>Yes.", ("Hm.", "Yes.", [])),
]


def read(
    form: ReasoningFormat, opening: str, text: str, cuts: Sequence[int] = (), calls: bool = True
) -> Said:
    in_content = calls and not isinstance(form, Harmony)
    reader = AnswerReader(
        partial(form.channels, opening, ["f"] if calls else []),
        CallReader(HERMES, ["f"]) if in_content else None,
    )
    places = [0, *sorted(cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    last = len(pieces) - 1
    news = [reader.read(piece, ends=number == last) for number, piece in enumerate(pieces)]
    content, found = joined(news)
    assert reader.calls == len(found)
    return "".join(one.reasoning for one in news), content, found


def reference(form: ReasoningFormat, text: str) -> Said:
    """Of texts that have the form, by expressions over all of it."""
    if isinstance(form, Think):
        opens, closes = form.tags
        form_of = rf"(?s)(?:{re.escape(opens)}(.*?)(?:{re.escape(closes)}|$))?(.*)"
        thought = re.fullmatch(form_of, text)
        assert thought is not None
        return thought[1] or "", thought[2], []
    reasoning, content, calls = "", "", list[tuple[str, str]]()
    for message in re.split(r"<\|(?:end|call|return)\|>", text):
        header, has_text, said = message.partition("<|message|>")
        if has_text and "functions." in header:
            calls.append((header.partition("functions.")[2].split("<")[0].split()[0], said))
        elif "analysis" in header:
            reasoning += said
        else:
            content += said
    return reasoning, content, calls


@pytest.mark.parametrize(("form", "opening", "text", "said"), TEXTS)
def test_an_output_is_reasoning_content_and_calls(
    form: ReasoningFormat, opening: str, text: str, said: Said
) -> None:
    assert read(form, opening, text) == said
    assert read(form, opening, text, range(len(text))) == said


_PARTS = st.sampled_from([
    *Harmony.tags, START, ANALYSIS, FINAL, CALL, "<think>", "</think>", "<tool_call>", "<", "|",
    ">", " ", "\n", "a", "{", '"', "to=", "functions.f", "analysis", "final", "assistant", "é",
    "x" * 300,
])  # fmt: skip


@given(st.sampled_from([HARMONY, THINK, GEMMA]), st.lists(_PARTS, max_size=12), st.data())
def test_any_text_says_the_same_however_it_is_cut(
    form: ReasoningFormat, parts: list[str], data: st.DataObject
) -> None:
    text = "".join(parts)
    opening = data.draw(st.sampled_from(["", form.opening(f"<think>{START}", goes_on=False)]))
    calls = data.draw(st.booleans())
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert read(form, opening, text, cuts, calls) == read(form, opening, text, (), calls)


_WORDS = st.text("ab \n{<é", max_size=6)
_MESSAGES = st.lists(
    st.tuples(
        st.sampled_from([ANALYSIS, FINAL, CALL, "<|channel|>commentary<|message|>"]),
        _WORDS,
        st.sampled_from(["<|end|>", "<|call|>", "<|return|>"]),
    ),
    max_size=4,
)


@given(_MESSAGES, st.data())
def test_harmony_is_read_as_the_reference_splits_it(
    messages: list[tuple[str, str, str]], data: st.DataObject
) -> None:
    text = START.join("".join(message) for message in messages)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert read(HARMONY, START, text, cuts) == reference(HARMONY, text)


@pytest.mark.parametrize("rest", [" <|constrain|>json", "<|channel|>commentary json", " json"])
def test_names_of_functions_may_have_spaces_and_begin_with_others(rest: str) -> None:
    functions = {"get", "get weather", "a<b"}
    for name in functions:
        channels = HARMONY.channels("", functions)
        text = f" to=functions.{name}{rest}<|message|>{{}}<|call|>"
        assert list(channels.pieces(text, ends=True)) == [("name", name), ("arguments", "{}")]


@given(_WORDS, _WORDS, st.sampled_from([THINK, GEMMA]), st.data())
def test_thinking_is_read_as_the_reference_splits_it(
    thought: str, content: str, form: Think, data: st.DataObject
) -> None:
    opens, closes = form.tags
    text = f"{opens}{thought}{closes}{content}"
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert read(form, "", text, cuts, calls=False) == reference(form, text)


@pytest.mark.parametrize(("form", "text", "said"), [(HARMONY, *one) for one in HARMONY_TEXTS[:9]])
def test_of_a_text_that_is_cut_off_the_beginning_is_told(
    form: ReasoningFormat, text: str, said: Said
) -> None:
    """Behind each token; letters are, here."""
    tokens = re.findall(rf"(?s){'|'.join(map(re.escape, form.tags))}|.", text)
    for number in range(len(tokens)):
        reasoning, content, calls = read(form, START, "".join(tokens[:number]))
        assert said[0].startswith(reasoning)
        assert said[1].startswith(content)
        assert [name for name, _ in said[2]][: len(calls)] == [name for name, _ in calls]
        assert all(a[1].startswith(b[1]) for a, b in zip(said[2], calls, strict=False))


@pytest.mark.parametrize(
    ("form", "before", "goes_on", "opening"),
    [
        (THINK, "<|im_start|>assistant\n<think>\n", False, "<think>"),
        (THINK, "<|im_start|>assistant\n<think>\n\n</think>\n\n", False, "</think>"),
        (THINK, "<think>\n<|im_end|>\n<|im_start|>assistant\n", False, ""),  # the user's word
        (THINK, "<think>\nFirst", True, "<think>"),
        (THINK, "<think>\nFirst</think>Yes", True, "</think>"),
        (THINK, "Yes, ", True, "</think>"),
        (THINK, "\n", True, ""),
        (GEMMA, "<|turn>model\n<|channel>thought\n<channel|>", False, "<channel|>"),
        (HARMONY, f"hi<|end|>{START}", False, START),
        (HARMONY, "hi", False, ""),
        (HARMONY, "hi", True, FINAL),
    ],
)
def test_prompts_may_open_the_reasoning(
    form: ReasoningFormat, before: str, goes_on: bool, opening: str
) -> None:
    assert form.opening(before, goes_on) == opening


@pytest.mark.parametrize(
    ("name", "template", "found"),
    [
        ("auto", "{{ '<|start|>assistant<|channel|>final<|message|>' }}", HARMONY),
        ("auto", "{{ content.split('</think>')[-1] }}", THINK.tags),
        ("auto", "{{ '<|channel>thought\\n<channel|>' }}", GEMMA.tags),
        ("auto", "{{ content }}", None),
        ("none", "{{ '</think>' }}", None),
        ("think", "{{ content }}", THINK.tags),
        ("think", "{{ '[/THINK]' }}", ("[THINK]", "[/THINK]")),
        ("harmony", "{{ '</think>' }}", HARMONY),
    ],
)
def test_the_template_or_the_configuration_says_the_format(
    name: str, template: str, found: object
) -> None:
    form = reasoning_of(name, template)  # type: ignore[arg-type]
    assert isinstance(form, Harmony) if found is HARMONY else (form and form.tags) == found
