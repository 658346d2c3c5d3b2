"""Schemas of arguments without what they do not name.

A JSON schema allows members that it does not name unless it says otherwise, and clients seldom say
it. Where calls are forced, a model would go on with arguments that the function does not have. What
the narrower schema allows, the client's allows too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Where one of these stands, the members of an object are named in several places.
_SPREAD = ("allOf", "if", "dependentSchemas", "unevaluatedProperties", "patternProperties")
_NAMED = ("properties", "$defs", "definitions")  # schemas by name
_LISTED = ("anyOf", "oneOf", "prefixItems")


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`additionalProperties: false` for every object that names its members in one place, and says
    nothing of others. Unchanged where members are spread over several schemas."""
    return dict(schema) if _is_spread(schema) else _closed(schema)


def _is_spread(schema: Any) -> bool:
    if isinstance(schema, Mapping):
        if any(name in schema for name in _SPREAD):
            return True
        return any(map(_is_spread, schema.values()))
    return isinstance(schema, list) and any(map(_is_spread, schema))


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
    # One beside alternatives names a part of the members only.
    alone = not any(name in found for name in ("anyOf", "oneOf", "$ref", "not"))
    if isinstance(found.get("properties"), Mapping) and alone:
        found.setdefault("additionalProperties", False)
    return found
