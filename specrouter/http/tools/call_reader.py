"""CallReader: splits a text, as it arrives, into content and tool calls.

Contract: the text is read by tags, and by characters between them, so that the joined result
depends on the text alone, and not on how it was cut. A call is reported when its name is known, and
its arguments as they arrive, as the model wrote them; arguments that stop being JSON extend to the
end tag. Text that looks like a call but is not one stays content, and so does all text around
calls except for the white space next to them.
"""

from __future__ import annotations

from collections.abc import Collection, Generator

from specrouter.http.reasoning.tags import Piece, TagCutter
from specrouter.http.tools.call_object import JsonScanner, call_of, name_before_arguments
from specrouter.http.tools.formats import ToolFormat

_Next = Generator[None, str, str]  # returns the character or tag after a call


class CallReader:
    """Reader of the calls in one text.

    Args:
        form: how the model writes calls.
        names: those of the functions that may be called.

    Attributes:
        is_within_call: the last call is not complete.
    """

    def __init__(self, form: ToolFormat, names: Collection[str]) -> None:
        self.is_within_call = False
        self._form, self._names = form, names
        self._tags = form.tags
        self._cutter = TagCutter(*self._tags)
        self._found: list[Piece] = []
        # Here an object may be a call without a tag: at the beginning, or after another call.
        self._is_open = not form.is_tagged
        self._follows_call = False  # only white space since a call
        self._may_close = False  # the end tag of a call may come
        self._reading = self._read()
        next(self._reading)

    def pieces(self, text: str, ends: bool = False) -> list[Piece]:
        """Read the next part of the text and return its pieces; `ends`: nothing follows."""
        for part in self._cutter.parts(text):
            self._feed(part)
        if ends:
            rest, end_tag = self._cutter.held, self._form.end_tag
            is_cut_off = rest and self._may_close and end_tag.startswith(rest)
            self._feed(end_tag if is_cut_off else rest)
            self._reading.send("")
        found, self._found = self._found, []
        return found

    def _feed(self, part: str) -> None:
        for one in (part,) if part in self._tags else part:
            self._reading.send(one)

    # Each of these generators gets one character or one whole tag at a time; "" is the end.

    def _read(self) -> Generator[None, str, None]:
        form, one = self._form, (yield)
        while True:
            space = ""
            while one.isspace() or (one == ";" and self._is_open and self._follows_call):
                space += one
                one = yield
            if not one:
                break
            if self._may_close and one == form.end_tag:
                self._may_close = False
                one = yield
            elif one == form.tag or (one == "{" and self._is_open):
                one = yield from self._tagged(space, one)
            else:
                self._say(space + one)
                one = yield
        if space and not self._follows_call:
            self._say(space)
        yield

    def _tagged(self, lead: str, one: str) -> _Next:
        """Read what may be a call, with its tag if it has one; `lead`: the text before it."""
        if one == self._form.tag:
            lead += one
            one = yield
            while one.isspace():
                lead += one
                one = yield
        scanner, text = JsonScanner(), ""
        while (text or one == "{") and scanner.step(one):
            if one == "{" and scanner.depth == 2:
                name = name_before_arguments(text)
                if name is not None and self._may_call(name):
                    self._begin(name)
                    return (yield from self._arguments(scanner, one))
            text += one
            if scanner.depth == 0:
                found = call_of(text, needs_arguments=not self._form.is_tagged)
                if found is not None and self._may_call(found[0]):
                    self._begin(found[0])
                    self._found.append(("arguments", found[1]))
                    self._end()
                else:
                    self._say(lead + text)
                return (yield)
            one = yield
        name = None if one else name_before_arguments(text)
        if name is not None and self._may_call(name):  # the text ends before the arguments
            self._begin(name)
        else:
            self._say(lead + text)
        return one

    def _arguments(self, scanner: JsonScanner, one: str) -> _Next:
        """Read arguments from their first character, which the scanner has, to the object's end."""
        while scanner.depth > 1:
            self._found.append(("arguments", one))
            one = yield
            if not scanner.step(one):
                return (yield from self._broken_arguments(one))
        self._found.append(("arguments", one))
        self._may_close = self._form.is_tagged
        one = yield
        while fits := scanner.step(one):
            if scanner.depth == 0:
                break
            one = yield
        if one:
            self._end()
        return (yield) if fits else one

    def _broken_arguments(self, one: str) -> _Next:
        while one and one != self._form.end_tag:
            self._found.append(("arguments", one))
            one = yield
        if one:
            self._end()
        return one

    def _say(self, text: str) -> None:
        self._found.append(("content", text))
        self._is_open = self._follows_call = self._may_close = False

    def _may_call(self, name: str) -> bool:
        """Return whether an object is a call: if calls have no tag, its name must be known."""
        return self._form.is_tagged or name in self._names

    def _begin(self, name: str) -> None:
        self._found.append(("name", name))
        self.is_within_call = True

    def _end(self) -> None:
        self.is_within_call, self._follows_call = False, True
        self._is_open, self._may_close = not self._form.is_tagged, self._form.is_tagged
