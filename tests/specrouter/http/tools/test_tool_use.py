"""`tools` and `tool_choice`: what may be called, what must be, and what is refused by its place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specrouter.http.tools.tool_use import MAX_CALLS, MAX_TOOLS, ToolChoice, asked_tools, closed
from specrouter.request.params import RequestError


def tool(name: Any = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_without_tools_and_with_none_nothing_is_called(choice: ToolChoice) -> None:
    for tools in (None, [], [tool()] if choice == "none" else []):
        assert asked_tools(tools, choice, None) is None


@pytest.mark.parametrize(
    ("choice", "parallel", "forced", "most"),
    [
        (None, None, False, None),
        ("auto", True, False, None),
        ("auto", False, False, 1),
        ("required", None, True, MAX_CALLS),
        ("required", False, True, 1),
        (named("g"), None, True, 1),
    ],
)
def test_a_choice_says_whether_and_how_often(
    choice: ToolChoice, parallel: bool | None, forced: bool, most: int | None
) -> None:
    use = asked_tools([tool("f"), tool("g")], choice, parallel)
    assert use is not None
    assert (use.forced, use.max_calls) == (forced, most)
    assert use.names == ({"g"} if isinstance(choice, dict) else {"f", "g"})


def test_a_function_without_parameters_takes_none() -> None:
    use = asked_tools([tool()], "auto", None)
    assert use is not None
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    assert use.functions[0].schema == schema


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        ([{}], None, "tools[0].type"),
        ([tool(), {"type": "web_search"}], "auto", "tools[1].type"),
        ([{"type": "function"}], "auto", "tools[0].function"),
        ([{"type": "function", "function": "f"}], "none", "tools[0].function"),
        ([tool(None)], "auto", "tools[0].function.name"),
        ([tool("")], "auto", "tools[0].function.name"),
        ([tool("a\nb")], "auto", "tools[0].function.name"),
        ([tool("\ud800")], "auto", "tools[0].function.name"),
        ([tool("a" * 129)], "auto", "tools[0].function.name"),
        ([tool(), tool("g"), tool()], "auto", "tools[2].function.name"),
        ([tool(parameters=[])], "auto", "tools[0].function.parameters"),
        ([tool(parameters={"type": "string"})], "auto", "tools[0].function.parameters.type"),
        ([tool(str(number)) for number in range(MAX_TOOLS + 1)], "auto", "tools"),
        (None, "required", "tool_choice"),
        (None, named("f"), "tool_choice"),
        ([tool()], named("g"), "tool_choice.function.name"),
        ([tool()], named(None), "tool_choice.function.name"),
        ([tool()], {"type": "function", "function": 3}, "tool_choice.function.name"),
        ([tool()], {"type": "custom"}, "tool_choice.type"),
        ([tool()], {}, "tool_choice.type"),
    ],
)
def test_what_is_wrong_is_refused_by_its_place(
    tools: list[dict[str, Any]] | None, choice: ToolChoice, field: str
) -> None:
    with pytest.raises(RequestError) as refused:
        asked_tools(tools, choice, None)
    assert refused.value.field == field


def test_schemas_that_are_too_deep_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"properties": {"a": deep}}
    with pytest.raises(RequestError, match="too deep"):
        asked_tools([tool(parameters=deep)], "auto", None)


# What a schema does not name is not made up

CLOSED = {"additionalProperties": False}
INNER: dict[str, Any] = {"properties": {}}  # an object within another


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "string"}}},
        # As pydantic writes an object within another.
        {"$defs": {"P": INNER}, "properties": {"p": {"$ref": "#/$defs/P"}}},
        {"properties": {"a": {"items": INNER}}},
        {"properties": {"a": {"anyOf": [INNER, {"type": "null"}]}}},
    ],
)
def test_objects_that_name_their_members_have_no_others(schema: dict[str, Any]) -> None:
    expected = json.loads(json.dumps(schema).replace(json.dumps(INNER), json.dumps(INNER | CLOSED)))
    assert closed(schema) == {**expected, **CLOSED}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},  # names none: any may come
        {"properties": {}, "additionalProperties": True},
        {"properties": {"a": {}}, "required": ["a", "b"]},  # closed, nothing would satisfy it
        {"properties": {}, "additionalProperties": {"type": "string"}},
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"properties": {"p": {"allOf": [{"$ref": "#/$defs/P"}]}}},
        {"properties": {"a": {}}, "patternProperties": {"^b": {}}},
        {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        # An alternative that was closed would forbid what stands beside it.
        {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}, {"properties": {}}]},
        {"$defs": {"P": {"properties": {"b": {}}}}, "properties": {"a": {}}, "$ref": "#/$defs/P"},
    ],
)
def test_what_may_have_others_is_left_as_it_is(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema
