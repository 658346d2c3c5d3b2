"""Structures of the content, and forced calls, behind reasoning."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from modelpool.checkpoint.bundled import bundled_root
from specrouter import RequestError
from specrouter.http.reasoning.formats import FORMATS, ReasoningFormat
from specrouter.http.reasoning.harmony import Harmony
from specrouter.http.tools.forced_calls import forced_calls
from specrouter.http.tools.formats import HERMES, ToolFormat, added_tags
from specrouter.http.tools.tool_use import asked_tools
from specrouter.request.grammar import GrammarCompiler
from specrouter.request.structure import Structure, StructureKind

Tokens = tuple[PreTrainedTokenizerBase, GrammarCompiler]
HARMONY, (THINK, GEMMA, *_) = Harmony(), FORMATS["think"]
START = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
ANALYSIS = f"<|channel|>analysis<|message|>Hm.\nIs {{ < it?<|end|>{START}"
STRUCTURES: list[tuple[StructureKind, Any, str, str]] = [
    ("choice", ["yes", "no"], "yes", "maybe"),
    ("json_object", "", '{"a": 1}', "1"),
    ("json_schema", {"properties": {"x": {"type": "integer"}}}, '{"x": 1}', '{"x": {}}'),
    ("regex", "a+b", "aab", "ba"),
    ("grammar", 'start: "x" y\ny: "z"', "xz", "xy"),
]
# The format, what the prompt has of the answer, outputs before the content, and outputs that may
# not stand there.
LEADS: list[tuple[ReasoningFormat, str, list[str], list[str]]] = [
    (HARMONY, START, [FINAL, ANALYSIS + FINAL, ANALYSIS * 2 + FINAL], ["", "<|channel|>analysis"]),
    (HARMONY, FINAL, [""], [FINAL]),
    (THINK, "", ["", "<think>Hm.\n</think>"], ["</think>", "<think></think>\n\n"]),
    (THINK, "<think>", ["\nHm. </thin</think>"], ["</think>\n"]),
    (THINK, "</think>", [""], ["<think></think>"]),
    (GEMMA, "", ["", "<|channel>thought\nHm.<channel|>"], ["<|channel>Hm.<channel|>"]),
]
F = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


@pytest.fixture(scope="module", params=["one token each", "spelled"])
def tokens(request: pytest.FixtureRequest) -> Tokens:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(bundled_root() / "tiny-3m")
    if request.param == "one token each":
        found.add_tokens([AddedToken(tag, normalized=False) for tag in THINK.tags])
        special = [*HARMONY.tags, "<|channel>", "<channel|>"]
        found.add_tokens([AddedToken(tag, normalized=False) for tag in special], True)
    return found, GrammarCompiler(found, len(found), [0])


def allows(tokens: Tokens, structure: Structure, text: str) -> bool:
    """Whether it is whole."""
    tokenizer, compiler = tokens
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    grammar = compiler.compile(structure)
    try:
        grammar.check(ids)
    except RequestError:
        return False
    matcher = grammar.matcher.deep_copy()
    assert matcher.consume_tokens(ids)
    return bool(matcher.is_accepting())


@pytest.mark.parametrize(("kind", "source", "good", "bad"), STRUCTURES)
@pytest.mark.parametrize(("form", "opening", "before", "not_before"), LEADS)
def test_a_structure_is_the_contents(
    tokens: Tokens,
    form: ReasoningFormat,
    opening: str,
    before: list[str],
    not_before: list[str],
    kind: StructureKind,
    source: Any,
    good: str,
    bad: str,
) -> None:
    ids = added_tags(form.tags, tokens[0])
    structure = Structure(kind, source, form.around(opening, ids, calls=False))
    for lead in before:
        assert allows(tokens, structure, lead + good), lead
        assert not allows(tokens, structure, lead + bad), lead
    assert not any(allows(tokens, structure, lead + good) for lead in not_before)


@pytest.mark.parametrize(
    ("form", "written", "opening", "head", "before"),
    [
        (
            HARMONY,
            HARMONY,
            START,
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
            ["", ANALYSIS],
        ),
        (THINK, HERMES, "", '<tool_call>\n{"name": "f", "arguments": ', ["", "<think>a</think>"]),
    ],
)
def test_forced_calls_may_follow_reasoning(
    tokens: Tokens,
    form: ReasoningFormat,
    written: ToolFormat | Harmony,
    opening: str,
    head: str,
    before: list[str],
) -> None:
    tools: list[Mapping[str, Any]] = [
        {"type": "function", "function": {"name": "f", "parameters": F}}
    ]
    use = asked_tools(tools, "required", parallel=False)
    assert use is not None
    ids = added_tags(form.tags, tokens[0])
    around = form.around(opening, ids, calls=True)
    structure = forced_calls(use, written, lambda _: None, ids, around)
    for lead in before:
        assert allows(tokens, structure, f"{lead}{head}{json.dumps({'x': 1})}{written.tail}")
        assert not allows(tokens, structure, f"{lead}{head}{{}}{written.tail}")
    assert not allows(tokens, structure, f"{FINAL}Hello")
