"""The object of a call: where it ends, its members in whatever order, and what is none."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrouter.http.tools.call_object import JsonScanner, call_of, name_before_arguments
from tests.pure import few

VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(),
    ),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=10,
)


@pytest.mark.parametrize(
    ("head", "name"),
    [
        ('{"name": "f", "arguments": ', "f"),
        ('{ "name":"f" ,\n"parameters":', "f"),
        ('{"type": "function", "name": "f", "parameters": ', "f"),
        ('{"name": "a \\"b\\" \\u00e9", "arguments": ', 'a "b" é'),
        ('{"arguments": ', None),
        ('{"name": "f", "a": ', None),
        ('{"name": "", "arguments": ', None),
        ('{"name": "\\ud800", "arguments": ', None),
        ('{"name": "\\x", "arguments": ', None),
    ],
)
def test_a_name_that_stands_before_the_arguments(head: str, name: str | None) -> None:
    assert name_before_arguments(head) == name


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"arguments": {"x": 1}, "name": "f"}', ("f", '{"x": 1}')),
        ('{"function": "f", "parameters": {"x": 1}}', ("f", '{"x": 1}')),
        (r'{"name": "f", "arguments": "{\"x\": 1}"}', ("f", '{"x": 1}')),
        ('{"name": "f", "arguments": null}', ("f", "{}")),
        ('{"name": "f", "arguments": [1]}', None),
        ('{"name": "f", "arguments": "x"}', None),
        ('{"name": 3, "arguments": {}}', None),
        ("{}", None),
        ('{"name": "f", }', None),
    ],
)
@pytest.mark.parametrize("needs_arguments", [False, True])
def test_a_whole_object(text: str, found: tuple[str, str] | None, needs_arguments: bool) -> None:
    assert call_of(text, needs_arguments) == found


def test_a_call_may_be_without_arguments_where_a_tag_says_that_it_is_one() -> None:
    assert call_of('{"name": "f"}', needs_arguments=False) == ("f", "{}")
    assert call_of('{"name": "f"}', needs_arguments=True) is None


@settings(max_examples=few(40), deadline=None)
@given(st.dictionaries(st.text(), VALUES), st.sampled_from([None, 1]), st.booleans())
def test_an_object_ends_at_its_last_character(
    value: dict[str, object], indent: int | None, ascii_only: bool
) -> None:
    scanner = JsonScanner()
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only, allow_nan=False)
    depths = []
    for character in text:
        assert scanner.step(character)
        depths.append(scanner.depth)
    assert [place for place, depth in enumerate(depths) if depth == 0] == [len(text) - 1]


@pytest.mark.parametrize("text", ["]", '{"a"}]', "{]", '{"a\n', "{<", "{x", "{'", '{"\x00'])
def test_what_cannot_be_json_is_refused_at_its_last_character(text: str) -> None:
    scanner = JsonScanner()
    assert all(map(scanner.step, text[:-1]))
    depth = scanner.depth
    assert not scanner.step(text[-1])
    assert scanner.depth == depth
