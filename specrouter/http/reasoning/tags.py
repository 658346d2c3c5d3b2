"""Tags in a text that arrives in pieces, and in a grammar; and the type of an output's pieces.

Contract: pure. No tag is a prefix of another, or has its first character twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Literal

Field = Literal["reasoning", "content", "name", "arguments"]
Piece = tuple[Field, str]  # a call is its name, then arguments up to another field


class TagCutter:
    """Cutter of a text at its tags.

    Its parts, joined, are the text, and its tags do not depend on how the text arrives. `held` is
    the possible beginning of a tag at the end, which has not been returned yet.
    """

    def __init__(self, *tags: str) -> None:
        self._tag = re.compile("|".join(map(re.escape, tags)))
        self._firsts = {tag[0] for tag in tags}
        self._begins = tuple({tag[:end] for tag in tags for end in range(1, len(tag))})
        self.held = ""

    def parts(self, text: str, ends: bool = False) -> Iterator[str]:
        """Yield tags, each alone, and the text between them; `ends`: nothing follows."""
        if text and not self.held and self._firsts.isdisjoint(text):  # true of nearly all pieces
            yield text
            return
        text, at = self.held + text, 0
        for found in self._tag.finditer(text):
            if at < found.start():
                yield text[at : found.start()]
            yield found[0]
            at = found.end()
        rest = text[at:]
        held = 0
        if not ends and rest.endswith(self._begins):
            held = max(len(one) for one in self._begins if rest.endswith(one))
        cut = len(rest) - held
        self.held = rest[cut:]
        if cut:
            yield rest[:cut]


def lark(text: str, ids: Mapping[str, int]) -> str:
    """Return the text in Lark's notation, as llguidance reads it, with `ids` in place of tags."""
    pieces = re.split(f"({'|'.join(map(re.escape, ids))})", text) if ids else [text]
    return " ".join(
        f"<[{ids[piece]}]>" if piece in ids else json.dumps(piece, ensure_ascii=False)
        for piece in pieces
        if piece
    )


def until(tag: str, ids: Mapping[str, int]) -> str:
    """Return the rules of `thought`: any text, then the tag."""
    if tag in ids:
        return f"thought: TEXT <[{ids[tag]}]>\nTEXT: /(?s:.*)/"
    pattern = re.escape(tag).replace("/", r"\/")
    return f"thought[lazy]: /(?s:.*){pattern}/"
