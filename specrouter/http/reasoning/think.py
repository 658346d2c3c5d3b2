"""Think: the format with reasoning between two tags at the beginning of the answer.

Contract: pure. Tags elsewhere are text. Many templates open the reasoning in the prompt.
Sources: the chat templates of DeepSeek-R1, Qwen3, Seed-OSS, Magistral and Gemma 4.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from specrouter.http.reasoning.tags import Field, Piece, TagCutter, lark, until


class Think:
    """Format of reasoning between two tags (see `formats`)."""

    calls = None

    def __init__(self, opens: str, closes: str) -> None:
        self.tags = (opens, closes)

    def is_taught(self, template: str) -> bool:
        return self.tags[1] in template

    def opening(self, before: str, goes_on: bool) -> str:
        opens, closes = self.tags
        if goes_on:
            if before.rfind(opens) > before.rfind(closes):
                return opens
            return closes if before.strip() else ""
        ends = (tag for tag in self.tags if before.rstrip().endswith(tag.rstrip()))
        return next(ends, "")

    def channels(self, opening: str, functions: Collection[str]) -> ThinkChannels:
        return ThinkChannels(*self.tags, opening)

    def around(self, opening: str, ids: Mapping[str, int], calls: bool) -> str:
        opens, closes = self.tags
        lead = {"": f"({lark(opens, ids)} thought)? ", opens: "thought ", closes: ""}[opening]
        return f"start: {lead}@body" + (f"\n{until(closes, ids)}" if lead else "")


class ThinkChannels:
    """Channels of an output (see `formats`)."""

    def __init__(self, opens: str, closes: str, opening: str) -> None:
        self._opens, self._closes = opens, closes
        self._cutter = TagCutter(opens, closes)
        self._may_open = not opening
        self.field: Field = "reasoning" if opening == opens else "content"

    def pieces(self, text: str, ends: bool = False) -> Iterator[Piece]:
        for part in self._cutter.parts(text, ends):
            if part == self._opens and self._may_open:
                self.field, self._may_open = "reasoning", False
            elif part == self._closes and self.field == "reasoning":
                self.field = "content"
            else:
                self._may_open = self._may_open and part.isspace()
                yield self.field, part
