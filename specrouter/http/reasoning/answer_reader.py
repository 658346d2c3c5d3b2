"""AnswerReader: an output as it comes, as reasoning, content and tool calls."""

from __future__ import annotations

from specrouter.http.reasoning.formats import Channels
from specrouter.http.tools.call_object import JsonScanner
from specrouter.http.tools.call_reader import CallNews, CallReader, News


class AnswerReader:
    """
    Args:
        calls: of those within the content.
        forced: the output is nothing but reasoning and calls.
        max_calls: of the channels; further ones are left out; None for none.

    Attributes: see `CallReader`.
    """

    def __init__(
        self,
        channels: Channels,
        calls: CallReader | None = None,
        forced: bool = False,
        max_calls: int | None = None,
    ) -> None:
        self.forced = forced
        self._channels, self._calls, self._max_calls = channels, calls, max_calls
        self._own_calls = 0
        self._arguments: list[str] = []  # of the last of them

    @property
    def calls(self) -> int:
        return self._own_calls + (self._calls.calls if self._calls else 0)

    @property
    def is_within_call(self) -> bool:
        """A whole object of arguments ends a call, too: its end tag may be cut off."""
        if self._calls is not None and self._calls.is_within_call:
            return True
        return self._channels.field == "arguments" and not _is_object("".join(self._arguments))

    def read(self, text: str, ends: bool = False) -> News:
        said = {"reasoning": "", "content": ""}
        calls: dict[int, CallNews] = {}
        for field, piece in self._channels.pieces(text, ends):
            if field == "name":
                calls[self._own_calls] = CallNews(self._own_calls, piece, "")
                self._own_calls += 1
                self._arguments = []
            elif field == "arguments":
                self._arguments.append(piece)
                index = self._own_calls - 1
                known = calls.get(index, CallNews(index, None, ""))
                calls[index] = CallNews(index, known.name, known.arguments + piece)
            else:
                said[field] += piece
        most = self._own_calls if self._max_calls is None else self._max_calls
        news = tuple(call for call in calls.values() if call.index < most)
        if self._calls is None:
            return News("" if self.forced else said["content"], news, said["reasoning"])
        within = self._calls.read(said["content"], ends)
        return News(within.content, (*news, *within.calls), said["reasoning"])


def _is_object(text: str) -> bool:
    scanner, text = JsonScanner(), text.strip()
    return text.startswith("{") and all(map(scanner.step, text)) and scanner.depth == 0


Reader = AnswerReader | CallReader
