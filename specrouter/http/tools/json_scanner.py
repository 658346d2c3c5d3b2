"""JsonScanner: where a JSON object ends, character by character.

Contract: looks at one character at a time, so that it cannot matter how a text was cut. It refuses
what certainly is no JSON (a character outside of texts that JSON does not know, a bracket that does
not fit, a control character within a text); it does not check what a parser would: order, numbers.
"""

from __future__ import annotations

_CLOSES = {"{": "}", "[": "]"}
# Outside of texts: punctuation, white space, numbers, and the letters of true, false and null.
_PLAIN = frozenset(",: \t\n\r" + "0123456789+-.eE" + "truefalsn")


class JsonScanner:
    """Of one object, of which `{` comes first. `depth`: how many brackets are open."""

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
