"""The JSON object of a call: where it ends, its name, its arguments, in the ways models write them.

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
_CLOSES = {"{": "}", "[": "]"}
# Outside of texts: punctuation, white space, numbers, and the letters of true, false and null.
_PLAIN = frozenset(",: \t\n\r" + "0123456789+-.eE" + "truefalsn")


class JsonScanner:
    """Where an object ends, of which `{` comes first. `depth`: how many brackets are open.

    It looks at one character at a time, so that it cannot matter how a text was cut. It refuses
    what certainly is no JSON (a character outside of texts that JSON does not know, a bracket that
    does not fit, a control character within a text); it does not check what a parser would: order,
    numbers.
    """

    def __init__(self) -> None:
        self._open: list[str] = []  # what closes them
        self._in_text = self._is_escaped = False

    @property
    def depth(self) -> int:
        return len(self._open)

    def step(self, character: str) -> bool:
        """Whether it may stand here; one that may not changes nothing."""
        if self._in_text:
            return self._step_in_text(character)
        if character in _CLOSES:
            self._open.append(_CLOSES[character])
        elif character in "}]":
            if not self._open or self._open[-1] != character:
                return False
            self._open.pop()
        elif character == '"':
            self._in_text = True
        else:
            return character in _PLAIN
        return True

    def _step_in_text(self, character: str) -> bool:
        if character < " ":
            return False
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._in_text = False
        return True


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
    arguments = object_of(found.get("arguments", found.get("parameters")))
    return None if arguments is None else (name, json.dumps(arguments))


def _checked_name(name: Any) -> str | None:
    """JSON can spell half a surrogate pair, which no answer can hold."""
    if not isinstance(name, str) or not name or any("\ud800" <= one <= "\udfff" for one in name):
        return None
    return name


def object_of(given: Any) -> dict[str, Any] | None:
    """Some models write the arguments as a text that holds JSON. None: they are no object."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return None
    if given is None:
        return {}
    return given if isinstance(given, dict) else None
