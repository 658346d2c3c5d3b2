"""AnswerReader: splits an output, as it arrives, into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from specrouter.http.reasoning.formats import Channels
from specrouter.http.reasoning.tags import Piece
from specrouter.http.tools.call_object import object_of
from specrouter.http.tools.call_reader import CallReader


@dataclass(frozen=True)
class CallNews:
    """New part of the call `index`: its name if it begins, and more of its arguments."""

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True)
class News:
    """Result of reading a piece of text; calls are ordered by index, each once."""

    content: str
    calls: tuple[CallNews, ...] = ()
    reasoning: str = ""


class AnswerReader:
    """Reader of one output.

    Args:
        channels: makes the channels of the output; None: all of it is content.
        reader: finds calls within the content.
        forced: the output is nothing but reasoning and calls.
        max_calls: further calls are left out; None: no limit.
        only: the name of the one function that may be called; None: there are several. A forced
            call gets it if the output ends before its name.

    Attributes:
        calls: number of calls begun so far.
    """

    def __init__(
        self,
        channels: Callable[[], Channels] | None = None,
        reader: CallReader | None = None,
        forced: bool = False,
        max_calls: int | None = None,
        only: str | None = None,
    ) -> None:
        self.forced = forced
        self.calls = 0
        self._reader, self._max_calls = reader, max_calls
        self._unnamed = only if forced else None  # name of a forced call that is cut off before it
        self._is_cut = False  # the call was cut off before its name
        self._channels = None if channels is None else channels()
        self._of_tokens = None if channels is None else channels()
        self._arguments: list[str] = []  # those of the last call

    @property
    def is_within_call(self) -> bool:
        """True if the last call is not complete.

        A channel's call is complete with a whole object of arguments: its end tag may be cut off.
        """
        if self._is_cut or (self._reader is not None and self._reader.is_within_call):
            return True
        is_open = self._channels is not None and self._channels.field == "arguments"
        return is_open and object_of("".join(self._arguments)) is None

    def read(self, text: str, ends: bool = False) -> News:
        """Read the next piece of text; `ends`: nothing follows."""
        reasoning, content = list[str](), list[str]()
        calls: dict[int, tuple[str | None, list[str]]] = {}
        for field, piece in self._pieces(text, ends):
            if field == "name":
                self._arguments = []
                calls[self.calls] = piece, []
                self.calls += 1
            elif field == "arguments":
                self._arguments.append(piece)
                calls.setdefault(self.calls - 1, (None, []))[1].append(piece)
            else:
                (reasoning if field == "reasoning" else content).append(piece)
        most = self.calls if self._max_calls is None else self._max_calls
        new_calls = tuple(
            CallNews(index, name, "".join(arguments))
            for index, (name, arguments) in calls.items()
            if index < most
        )
        return News("" if self.forced else "".join(content), new_calls, "".join(reasoning))

    def is_reasoning(self, token: str) -> bool:
        """Read the next token, and return whether it is reasoning: neither tag nor header."""
        channels = self._of_tokens
        if channels is None:
            return False
        was_within = channels.field == "reasoning"
        list(channels.pieces(token))
        return was_within and channels.field == "reasoning"

    def _pieces(self, text: str, ends: bool) -> Iterator[Piece]:
        channels, reader = self._channels, self._reader
        pieces: Iterable[Piece] = [("content", text)]
        for field, piece in pieces if channels is None else channels.pieces(text, ends):
            if field == "content" and reader is not None:
                yield from reader.pieces(piece)
            else:
                yield field, piece
        for field, piece in reader.pieces("", ends) if ends and reader is not None else ():
            yield field, piece
            if field == "content" and self._unnamed is not None and not self.calls:
                self._is_cut = True
                yield "name", self._unnamed
