"""The JSON object of a call: its end, its name and its arguments, in the forms that models write.

Contract: pure. A result of None means that the text is no call.
"""

from __future__ import annotations

import json
import re
from typing import Any

# An object up to its arguments. One with another order of members is parsed as a whole.
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*'
)
_CLOSES = {"{": "}", "[": "]"}
# Characters outside of strings: punctuation, white space, numbers, and true, false, null.
_PLAIN = frozenset(",: \t\n\r" + "0123456789+-.eE" + "truefalsn")


class JsonScanner:
    """Scanner that finds the end of an object, which begins with `{`.

    It reads one character at a time, so that it does not matter how a text was cut. It refuses
    what cannot be JSON (a character outside of strings that JSON does not have, a bracket that does
    not match, a control character in a string); unlike a parser, it checks neither order nor
    numbers. `depth`: number of open brackets.
    """

    def __init__(self) -> None:
        self._open: list[str] = []  # the brackets that close them
        self._in_text = self._is_escaped = False

    @property
    def depth(self) -> int:
        return len(self._open)

    def step(self, character: str) -> bool:
        """Read a character, and return whether it may stand here; if not, nothing changes."""
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
    """Return the name in the text of an object whose arguments come next, or None."""
    found = _HEAD.fullmatch(head)
    if found is None:
        return None
    try:
        return _checked_name(json.loads(found[1]))
    except ValueError:
        return None


def call_of(text: str, needs_arguments: bool) -> tuple[str, str] | None:
    """Return the name and the arguments, as JSON, of a whole object; None if it is no call.

    Args:
        text: the object, as JSON.
        needs_arguments: True: an object without arguments is no call; False: they are empty then.
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
    """Return a valid name or None: JSON can spell half a surrogate pair, which UTF-8 cannot."""
    if not isinstance(name, str) or not name or any("\ud800" <= one <= "\udfff" for one in name):
        return None
    return name


def object_of(given: Any) -> dict[str, Any] | None:
    """Return arguments as an object, also from JSON in a string; None if they are not one."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return None
    if given is None:
        return {}
    return given if isinstance(given, dict) else None
