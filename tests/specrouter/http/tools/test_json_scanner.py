"""Where an object of JSON ends."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrouter.http.tools.json_scanner import JsonScanner

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
