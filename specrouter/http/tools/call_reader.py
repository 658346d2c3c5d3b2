"""CallReader: a text as it comes, as content and tool calls.

Contract: goes through the text by tags, and by characters between them, so that what all readings
together say depends on the text alone, and not on how it was cut. A call is told when its name is
known, and its arguments as they come, as the model wrote them; from where they are no JSON they go
on to the end tag. What looks like a call and is none stays content, and so does all text around
calls but the white space next to them. In an answer that is nothing but calls there is no content.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from specrouter.http.reasoning.tags import TagCutter
from specrouter.http.tools.call_object import JsonScanner, call_of, name_before_arguments
from specrouter.http.tools.formats import ToolFormat


@dataclass(frozen=True)
class CallNews:
    """Of the call `index`: its name where it begins, and more of its arguments."""

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True)
class News:
    """What a piece of text brought; calls by rising index, each once."""

    content: str
    calls: tuple[CallNews, ...] = ()
    reasoning: str = ""


class CallReader:
    """
    Args:
        names: of the functions that may be called.
        forced: the text is nothing but calls.
        max_calls: further ones are left out; None for none.

    Attributes:
        calls: begun so far.
        is_within_call: the last one is not complete.
    """

    def __init__(
        self,
        form: ToolFormat,
        names: Collection[str],
        forced: bool = False,
        max_calls: int | None = None,
    ) -> None:
        self.forced = forced
        self._form, self._names, self._max_calls = form, names, max_calls
        self._tags = form.tags
        self._cutter = TagCutter(*self._tags)
        self.calls = 0
        self.is_within_call = False
        self._step: Callable[[str], None] = self._text if form.is_tagged else self._between
        self._content: list[str] = []  # news
        self._names_begun: dict[int, str] = {}
        self._arguments: dict[int, list[str]] = {}
        self._space: list[str] = []  # maybe before a call
        self._lead = ""  # of what may be a call, before its object
        self._object: list[str] = []
        self._scanner = JsonScanner()
        self._is_plain = False  # the object is no call, or is read as a whole
        self._follows_call = False  # nothing but white space since

    def read(self, text: str, ends: bool = False) -> News:
        """`ends`: nothing follows."""
        for part in self._cutter.parts(text):
            for one in (part,) if part in self._tags else part:
                self._step(one)
        if ends:
            self._finish()
        content = "" if self.forced else "".join(self._content)
        most = self.calls if self._max_calls is None else self._max_calls
        calls = tuple(
            CallNews(index, self._names_begun.get(index), "".join(self._arguments[index]))
            for index in sorted(self._arguments)
            if index < most
        )
        self._content, self._arguments, self._names_begun = [], {}, {}
        return News(content, calls)

    # One step for each place in a text. Each takes one character, or one whole tag.

    def _text(self, one: str) -> None:
        """Content, behind which a tag may come."""
        if one == self._form.tag:
            self._lead = "".join(self._space) + one
            self._space = []
            self._open_object()
        elif one.isspace():
            self._space.append(one)
        else:
            self._say(one)

    def _between(self, one: str) -> None:
        """Where an object may be a call: at the beginning, or behind one."""
        if one.isspace() or (one == ";" and self._follows_call):
            self._space.append(one)
            return
        self._lead += "".join(self._space)
        self._space = []
        if one == self._form.tag:
            self._lead += one
        elif one == "{":
            self._open_object()
            self._step(one)
        else:
            self._say_no_call(self._lead)
            self._step(one)

    def _in_object(self, one: str) -> None:
        """Within what may be a call, before its arguments."""
        if not self._object and one.isspace():
            self._lead += one
            return
        if not (self._object or one == "{") or not self._scanner.step(one):
            self._say_no_call(self._lead + "".join(self._object))
            self._step(one)
            return
        if one == "{" and self._scanner.depth == 2 and not self._is_plain:
            self._is_plain = True  # whatever else it is: this is its first inner object
            name = name_before_arguments("".join(self._object))
            if name is not None and self._may_call(name):
                self._begin(name)
                self._argue(one)
                self._step = self._in_arguments
                return
        self._object.append(one)
        if self._scanner.depth == 0:
            self._read_object("".join(self._object))

    def _in_arguments(self, one: str) -> None:
        if not self._scanner.step(one):
            self._step = self._in_broken_arguments
            self._step(one)
            return
        self._argue(one)
        if self._scanner.depth == 1:
            self._step = self._behind_arguments

    def _behind_arguments(self, one: str) -> None:
        """Of a call's object there is no more than its end to come."""
        fits = self._scanner.step(one)
        if not fits or self._scanner.depth == 0:
            self._end()
        if not fits:
            self._step(one)

    def _in_broken_arguments(self, one: str) -> None:
        if one == self._form.end_tag:
            self._end()
            self._step = self._text
        else:
            self._argue(one)

    def _behind_call(self, one: str) -> None:
        """The end tag, which may be missing."""
        if one.isspace():
            self._space.append(one)
            return
        self._step = self._text
        if one == self._form.end_tag:
            self._space = []
        else:
            self._text(one)

    # What they have in common.

    def _say(self, text: str) -> None:
        self._content += (*self._space, text)
        self._space, self._follows_call = [], False

    def _say_no_call(self, text: str) -> None:
        """Content that might have been a call; all that was held is part of it."""
        self._step = self._text
        self._lead, self._space = "", []
        space = text[: len(text) - len(text.lstrip())]
        self._space += space
        if len(text) > len(space):
            self._say(text[len(space) :])

    def _open_object(self) -> None:
        self._object, self._scanner, self._is_plain = [], JsonScanner(), False
        self._step = self._in_object

    def _read_object(self, text: str) -> None:
        """One that was not read as it came."""
        found = call_of(text, needs_arguments=not self._form.is_tagged)
        if found is None or not self._may_call(found[0]):
            self._say_no_call(self._lead + text)
            return
        name, arguments = found
        self._begin(name)
        self._argue(arguments)
        self._end()

    def _may_call(self, name: str) -> bool:
        """A tag says that it is a call; else only the name does."""
        return self._form.is_tagged or name in self._names

    def _begin(self, name: str) -> None:
        self._lead = ""
        self._names_begun[self.calls] = name
        self._arguments[self.calls] = []
        self.calls += 1
        self.is_within_call = True

    def _argue(self, text: str) -> None:
        self._arguments.setdefault(self.calls - 1, []).append(text)

    def _end(self) -> None:
        self.is_within_call, self._follows_call = False, True
        self._step = self._behind_call if self._form.is_tagged else self._between

    def _finish(self) -> None:
        rest = self._cutter.held
        if rest and self._step == self._behind_arguments and not self._scanner.step(rest[0]):
            self._end()  # it stands in no string of the object
        if self._step != self._behind_call or not self._form.end_tag.startswith(rest):
            for one in rest:
                self._step(one)
        if self._step == self._in_object:
            self._say_no_call(self._lead + "".join(self._object))
        elif self._step == self._behind_call:
            self._space = []
        elif self._lead:
            self._say_no_call(self._lead + "".join(self._space))
        if not self._follows_call:
            self._content += self._space
        self._space = []
