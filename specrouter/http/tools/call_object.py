"""The JSON object of a call: its name and its arguments, in the ways in which models write them.

Contract: pure. What is None is no call.
"""

from __future__ import annotations

import json
import re
from typing import Any

# An object up to its arguments. All other orders of its members are read as a whole.
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*'
)


def name_before_arguments(head: str) -> str | None:
    """Of an object whose arguments come next, and after its name."""
    found = _HEAD.fullmatch(head)
    if found is None:
        return None
    try:
        return _checked_name(json.loads(found[1]))
    except ValueError:
        return None


def call_of(text: str, needs_arguments: bool) -> tuple[str, str] | None:
    """Name and arguments, as JSON, of a whole object.

    Args:
        needs_arguments: without them it is none; else they are an empty object.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name = _checked_name(found.get("name", found.get("function")))
    if name is None or (needs_arguments and not {"arguments", "parameters"} & found.keys()):
        return None
    arguments = _object_of(found.get("arguments", found.get("parameters")))
    return None if arguments is None else (name, json.dumps(arguments))


def _checked_name(name: Any) -> str | None:
    """JSON can spell half a surrogate pair, which no answer can hold."""
    if not isinstance(name, str) or not name or any("\ud800" <= one <= "\udfff" for one in name):
        return None
    return name


def _object_of(given: Any) -> dict[str, Any] | None:
    """Some models write the arguments as a text that holds JSON."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return None
    if given is None:
        return {}
    return given if isinstance(given, dict) else None
