"""CallReader: a text as it comes, as content and tool calls.

Contract: goes through the text character by character, so that what all readings together say
depends on the text alone, and not on how it was cut. A call is told when its name is known, and
its arguments as they come, as the model wrote them; from where they are no JSON they go on to the
end tag. What looks like a call and is none stays content, and so does all text around calls but
the white space next to them. In an answer that is nothing but calls there is no content.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

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
        self._form, self._names = form, names
        self._max_calls = max_calls
        self.calls = 0
        self.is_within_call = False
        self._step: Callable[[str], None] = self._text if form.is_tagged else self._between
        self._content: list[str] = []  # news
        self._names_begun: dict[int, str] = {}
        self._arguments: dict[int, list[str]] = {}
        self._space: list[str] = []  # maybe before a call
        self._tag = ""  # what may become a tag
        self._lead = ""  # of what may be a call, before its object
        self._object: list[str] = []
        self._scanner = JsonScanner()
        self._is_plain = False  # the object is no call, or is read as a whole
        self._follows_call = False  # nothing but white space since

    def read(self, text: str, ends: bool = False) -> News:
        """`ends`: nothing follows."""
        for character in text:
            self._step(character)
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

    # One step for each place in a text. Each takes one character.

    def _text(self, character: str) -> None:
        """Content, behind which a tag may come."""
        if self._grows(self._form.tag, character):
            if self._tag == self._form.tag:
                self._lead = "".join(self._space) + self._tag
                self._space, self._tag = [], ""
                self._open_object()
        elif self._tag:
            self._say(self._tag)
            self._tag = ""
            self._text(character)
        elif character.isspace():
            self._space.append(character)
        else:
            self._say(character)

    def _between(self, character: str) -> None:
        """Where an object may be a call: at the beginning, or behind one."""
        if self._grows(self._form.tag, character):
            if self._tag == self._form.tag:
                self._lead += "".join(self._space) + self._tag
                self._space, self._tag = [], ""
        elif self._tag:
            self._say_no_call(self._lead + "".join(self._space) + self._tag)
            self._step(character)
        elif character.isspace() or (character == ";" and self._follows_call):
            self._space.append(character)
        elif character == "{":
            self._lead += "".join(self._space)
            self._space = []
            self._open_object()
            self._step(character)
        else:
            self._say_no_call(self._lead + "".join(self._space))
            self._step(character)

    def _in_object(self, character: str) -> None:
        """Within what may be a call, before its arguments."""
        if not self._object and character.isspace():
            self._lead += character
            return
        if not (self._object or character == "{") or not self._scanner.step(character):
            self._say_no_call(self._lead + "".join(self._object))
            self._step(character)
            return
        if character == "{" and self._scanner.depth == 2 and not self._is_plain:
            self._is_plain = True  # whatever else it is: this is its first inner object
            name = name_before_arguments("".join(self._object))
            if name is not None and self._may_call(name):
                self._begin(name)
                self._argue(character)
                self._step = self._in_arguments
                return
        self._object.append(character)
        if self._scanner.depth == 0:
            self._read_object("".join(self._object))

    def _in_arguments(self, character: str) -> None:
        if not self._scanner.step(character):
            self._step = self._in_broken_arguments
            self._step(character)
            return
        self._argue(character)
        if self._scanner.depth == 1:
            self._step = self._behind_arguments

    def _behind_arguments(self, character: str) -> None:
        """Of a call's object there is no more than its end to come."""
        fits = self._scanner.step(character)
        if not fits or self._scanner.depth == 0:
            self._end()
        if not fits:
            self._step(character)

    def _in_broken_arguments(self, character: str) -> None:
        if self._form.end_tag and self._grows(self._form.end_tag, character):
            if self._tag == self._form.end_tag:
                self._tag = ""
                self._end()
                self._step = self._text
            return
        broken, self._tag = self._tag, ""
        if broken:
            self._argue(broken)
            self._step(character)
        else:
            self._argue(character)

    def _behind_call(self, character: str) -> None:
        """The end tag, which may be missing."""
        if self._grows(self._form.end_tag, character):
            if self._tag == self._form.end_tag:
                self._tag, self._space = "", []
                self._step = self._text
        elif character.isspace() and not self._tag:
            self._space.append(character)
        else:
            held, self._tag, self._step = self._tag, "", self._text
            for one in held + character:
                self._text(one)

    # What they have in common.

    def _grows(self, tag: str, character: str) -> bool:
        """Whether what is held may still become the tag; no tag has its first character twice."""
        if not tag.startswith(self._tag + character):
            return False
        self._tag += character
        return True

    def _say(self, text: str) -> None:
        self._content += (*self._space, text)
        self._space, self._follows_call = [], False

    def _say_no_call(self, text: str) -> None:
        """Content that might have been a call; all that was held is part of it."""
        self._step = self._text
        self._lead, self._tag, self._space = "", "", []
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
        if self._step == self._in_broken_arguments:
            self._argue(self._tag)
        elif self._step == self._in_object:
            self._say_no_call(self._lead + "".join(self._object))
        elif self._step == self._behind_call:
            self._space = []
        elif self._lead or self._tag:
            self._say_no_call(self._lead + "".join(self._space) + self._tag)
        if not self._follows_call:
            self._content += self._space
        self._space = []
