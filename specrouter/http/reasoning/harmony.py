"""Harmony: the format of gpt-oss, messages with headers.

    <|start|>ROLE to=RECIPIENT<|channel|>CHANNEL to=RECIPIENT <|constrain|>json<|message|>...<|end|>

Contract: pure. The prompt ends within the first header. Messages in the channel `analysis`, and
those to the model's built-in tools, are reasoning; a message to `functions.NAME` is a call if the
function may be called; all else is content, also text that does not fit the format.
Source: https://github.com/openai/harmony, docs/format.md
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from specrouter.http.reasoning.tags import Field, Piece, TagCutter, lark, until

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_CONSTRAIN = "<|constrain|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|endoftext|>")
_TAGS = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)
_FINAL = f"{_CHANNEL}final{_MESSAGE}"
_ANALYSIS = f"{_CHANNEL}analysis{_MESSAGE}"
_FUNCTIONS = "functions."
_LONGEST_HEADER = 512  # characters; names of functions have up to 128

_ROLES = ("assistant", "user", "system", "developer", "tool")
_ROLE = rf"<\|start\|>\s*({'|'.join(_ROLES)}|functions\.\S*)?"
_BEGUN = "|".join(sorted({role[:n] for role in _ROLES for n in range(len(role))}, reverse=True))
_ROLE_OR_CUT = rf"<\|start\|>\s*({'|'.join(_ROLES)}|functions\.\S*|{_BEGUN})"
_TO = r"(\s+t(o(=\S*\s*(<\|constrain\|>)?\s*\w*\s*)?)?)?"
# A header, or the beginning of one.
_HEADER = re.compile(rf"({_ROLE_OR_CUT})?{_TO}\s*(<\|channel\|>\s*[a-z]*{_TO}\s*)?")
_ANY_TAG = re.compile("|".join(map(re.escape, _TAGS)))


class Harmony:
    """Format of reasoning (see `formats`), and of its calls (see `ToolFormat`)."""

    tags = _TAGS
    separator = tail = ""

    @property
    def calls(self) -> Harmony:
        return self

    def is_taught(self, template: str) -> bool:
        return all(tag in template for tag in (_START, _CHANNEL, _MESSAGE))

    def opening(self, before: str, goes_on: bool) -> str:
        if goes_on:
            return _FINAL
        _, start, header = before.rpartition(_START)
        return start + header if start else ""

    def channels(self, opening: str, functions: Collection[str]) -> HarmonyChannels:
        return HarmonyChannels(opening, functions)

    def around(self, opening: str, ids: Mapping[str, int], calls: bool) -> str:
        if self.channels(opening, ()).field == "content":
            return "start: @body"
        end, *_ = _ENDS
        analysis = f"({lark(_ANALYSIS, ids)} thought {lark(f'{_START}assistant', ids)})*"
        final = "" if calls else f" {lark(_FINAL, ids)}"
        return f"start: {analysis}{final} @body\n{until(end, ids)}"

    def head(self, name: str) -> str:
        return f"{_CHANNEL}commentary to={_FUNCTIONS}{name} {_CONSTRAIN}json{_MESSAGE}"


class HarmonyChannels:
    """Channels of an output (see `formats`)."""

    def __init__(self, opening: str, functions: Collection[str]) -> None:
        self._cutter = TagCutter(*_TAGS)
        self._functions = functions
        self._header: str | None = ""  # None: within a message
        self.field: Field = "name"
        list(self.pieces(opening))

    def pieces(self, text: str, ends: bool = False) -> Iterator[Piece]:
        for part in self._cutter.parts(text, ends):
            if part in _TAGS:
                yield from self._tag(part)
            elif self._header is None:
                yield self.field, part
            else:
                self._header += part
                if "\n" in self._header or len(self._header) > _LONGEST_HEADER:
                    yield "content", self._no_header()
                    self._header, self.field = None, "content"
        if ends:
            yield from self._end_header()

    def _tag(self, tag: str) -> Iterator[Piece]:
        header = self._header
        if header is None:
            if tag in (_MESSAGE, _CONSTRAIN):  # no meaning within a message
                return
            self._begin_header("" if tag in _ENDS else tag)
        elif tag == _MESSAGE:
            yield from self._begin_message(header)
        elif tag == _CONSTRAIN or (tag == _CHANNEL and _CHANNEL not in header):
            self._header = header + tag
        else:
            yield from self._end_header()
            self._begin_header("" if tag in _ENDS else tag)

    def _begin_header(self, tag: str) -> None:
        self._header, self.field = tag, "name"

    def _begin_message(self, header: str) -> Iterator[Piece]:
        to = re.search(r"\bto=([^\s<]+)", header)
        channel = re.search(r"<\|channel\|>\s*(\w*)", header)
        self._header, self.field = None, "content"
        is_call = to is not None and to[1].startswith(_FUNCTIONS)
        name = self._known(header.partition(f"to={_FUNCTIONS}")[2]) if is_call else None
        if name is not None:
            self.field = "arguments"
            yield "name", name
        elif channel and channel[1] != "final" and not is_call:
            to_tool = to is not None and to[1] != "assistant"
            self.field = "reasoning" if channel[1] == "analysis" or to_tool else "content"

    def _known(self, called: str) -> str | None:
        """Return the longest function name that `called` begins with: names may have spaces."""
        known = (one for one in self._functions if re.match(rf"{re.escape(one)}(\s|<|$)", called))
        return max(known, key=len, default=None)

    def _end_header(self) -> Iterator[Piece]:
        """End a header without a message, and yield its text if it is no header."""
        if self._header and not _HEADER.fullmatch(self._header):
            yield "content", self._no_header()
        if self._header is not None:
            self._header = ""

    def _no_header(self) -> str:
        header = self._header or ""
        role = re.match(_ROLE, header)
        return _ANY_TAG.sub("", header[role.end() if role else 0 :])
