"""ToolUse: the functions that a chat may or must call, from `tools` and `tool_choice`.

Contract: every mistake is refused with a `RequestError` that names the place. Schemas are only
inspected here; they are compiled if calls are forced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specrouter.request.params import RequestError

MAX_TOOLS = 128  # OpenAI's
MAX_CALLS = 16  # in an answer with forced calls: a weak model might never end
_LONGEST_NAME = 128

# With one of these, the members of an object are named in several places.
_SPREAD = ("allOf", "if", "dependentSchemas", "unevaluatedProperties", "patternProperties")
_NAMED = ("properties", "$defs", "definitions")  # schemas by name
_LISTED = ("anyOf", "oneOf", "prefixItems")
_ALTERNATIVES = ("anyOf", "oneOf", "$ref")  # beside `properties`, they name further members

ToolChoice = str | Mapping[str, Any] | None


@dataclass(frozen=True)
class Function:
    """Function of a request; `place`: its path there; `schema`: that of its arguments."""

    place: str
    name: str
    schema: Mapping[str, Any]


@dataclass(frozen=True)
class ToolUse:
    """Allowed calls; `forced`: the answer is nothing else; `max_calls`: None for no limit."""

    functions: tuple[Function, ...]
    forced: bool
    max_calls: int | None

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function.name for function in self.functions)


def asked_tools(
    tools: Sequence[Mapping[str, Any]] | None, choice: ToolChoice, parallel: bool | None
) -> ToolUse | None:
    """Return the calls that are allowed, or None if there are none.

    Args:
        tools: those of the request.
        choice: its `tool_choice`.
        parallel: its `parallel_tool_calls`; False for at most one call.

    Raises:
        RequestError: names the field: `tools`, `tool_choice`, or a place in them.
    """
    functions = _functions(tools or ())
    if choice in (None, "none", "auto"):
        if not functions or choice == "none":
            return None
        return ToolUse(functions, forced=False, max_calls=1 if parallel is False else None)
    if not functions:
        raise RequestError("tool_choice", "needs tools to choose from")
    if choice == "required":
        return ToolUse(functions, forced=True, max_calls=1 if parallel is False else MAX_CALLS)
    assert isinstance(choice, Mapping)
    return ToolUse((_named(choice, functions),), forced=True, max_calls=1)


def _functions(tools: Sequence[Mapping[str, Any]]) -> tuple[Function, ...]:
    if len(tools) > MAX_TOOLS:
        raise RequestError("tools", f"must be at most {MAX_TOOLS}, not {len(tools)}")
    found: dict[str, Function] = {}
    for at, tool in enumerate(tools):
        function = _function(f"tools[{at}]", tool)
        if function.name in found:
            place = found[function.name].place
            raise RequestError(f"{function.place}.name", f"is that of {place} too")
        found[function.name] = function
    return tuple(found.values())


def _function(place: str, tool: Mapping[str, Any]) -> Function:
    if tool.get("type") != "function":
        raise RequestError(f"{place}.type", 'must be "function": no other tools are known here')
    place, given = f"{place}.function", tool.get("function")
    if not isinstance(given, Mapping):
        raise RequestError(place, "must be an object")
    name, schema = given.get("name"), given.get("parameters")
    if not isinstance(name, str) or not name.isprintable() or not 1 <= len(name) <= _LONGEST_NAME:
        reason = f"must be a text of 1 to {_LONGEST_NAME} printable characters"
        raise RequestError(f"{place}.name", reason)
    if schema is None:  # OpenAI's: a function without parameters
        schema = {"properties": {}}
    if not isinstance(schema, Mapping):
        raise RequestError(f"{place}.parameters", "must be a JSON schema, which is an object")
    if schema.get("type", "object") != "object":
        raise RequestError(f"{place}.parameters.type", 'must be "object"')
    try:
        narrowed = closed(schema)
    except RecursionError:
        raise RequestError(f"{place}.parameters", "is too deep") from None
    return Function(place, name, {**narrowed, "type": "object"})


def _named(choice: Mapping[str, Any], functions: Sequence[Function]) -> Function:
    if choice.get("type") != "function":
        reason = 'must be "function"; known beside it are "none", "auto" and "required"'
        raise RequestError("tool_choice.type", reason)
    given = choice.get("function")
    for place, one, known in (("", choice, "type function"), (".function", given, "name")):
        for key in one if isinstance(one, Mapping) else ():
            if key not in known.split():
                raise RequestError(f"tool_choice{place}.{key}", "is unknown")
    name = given.get("name") if isinstance(given, Mapping) else None
    for function in functions:
        if function.name == name:
            return function
    known = ", ".join(function.name for function in functions)[:200]
    raise RequestError("tool_choice.function.name", f"must be one of the tools: {known}")


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema without members that it does not name.

    A JSON schema allows them unless it forbids them, and clients rarely do; with forced calls, a
    model would go on with arguments that the function does not have. The client's schema allows
    all that the narrower one does: `additionalProperties: false` is added only to objects that
    name their members in one place. A schema is unchanged if members are spread over several.
    """
    return dict(schema) if _is_spread(schema) else _closed(schema)


def _is_spread(schema: Any) -> bool:
    if isinstance(schema, Mapping):
        if any(name in schema for name in _SPREAD):
            return True
        if "properties" in schema and any(name in schema for name in _ALTERNATIVES):
            return True
        return any(map(_is_spread, schema.values()))
    return isinstance(schema, list) and any(map(_is_spread, schema))


def _are_named(schema: Mapping[str, Any], properties: Mapping[str, Any]) -> bool:
    """Return whether all required members are among the properties."""
    required = schema.get("required")
    return not isinstance(required, list) or all(each in properties for each in required)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    for name in _NAMED:
        if isinstance(found.get(name), Mapping):
            found[name] = {key: _closed(value) for key, value in found[name].items()}
    for name in _LISTED:
        if isinstance(found.get(name), list):
            found[name] = [_closed(value) for value in found[name]]
    if isinstance(found.get("items"), Mapping):
        found["items"] = _closed(found["items"])
    named = found.get("properties")
    if isinstance(named, Mapping) and "not" not in found and _are_named(found, named):
        found.setdefault("additionalProperties", False)
    return found
