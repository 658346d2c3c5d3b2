"""The object of a call: in whatever order, and what is none."""

from __future__ import annotations

import pytest

from specrouter.http.tools.call_object import call_of, name_before_arguments


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
