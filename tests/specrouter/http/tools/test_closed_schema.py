"""Schemas of arguments: what they do not name is not made up."""

from __future__ import annotations

from typing import Any

import pytest

from specrouter.http.tools.closed_schema import closed

CLOSED = {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"properties": {"a": {"type": "string"}}}, {"properties": {"a": {"type": "string"}}}),
        # As pydantic writes an object within another.
        (
            {"$defs": {"P": {"properties": {}}}, "properties": {"p": {"$ref": "#/$defs/P"}}},
            {
                "$defs": {"P": {"properties": {}, **CLOSED}},
                "properties": {"p": {"$ref": "#/$defs/P"}},
            },
        ),
        (
            {"properties": {"a": {"items": {"properties": {}}}}},
            {"properties": {"a": {"items": {"properties": {}, **CLOSED}}}},
        ),
        (
            {"properties": {"a": {"anyOf": [{"properties": {}}, {"type": "null"}]}}},
            {"properties": {"a": {"anyOf": [{"properties": {}, **CLOSED}, {"type": "null"}]}}},
        ),
    ],
)
def test_objects_that_name_their_members_have_no_others(
    schema: dict[str, Any], found: dict[str, Any]
) -> None:
    assert closed(schema) == {**found, **CLOSED}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},  # names none: any may come
        {"properties": {}, "additionalProperties": True},
        {"properties": {}, "additionalProperties": {"type": "string"}},
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"properties": {"p": {"allOf": [{"$ref": "#/$defs/P"}]}}},
        {"properties": {"a": {}}, "patternProperties": {"^b": {}}},
        {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    ],
)
def test_what_may_have_others_is_left_as_it_is(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema
