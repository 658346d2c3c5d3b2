"""Known formats of reasoning, and the choice of one by the chat template.

Contract: a format is pure, and has

    tags: those in the text; some are special tokens, which texts omit by default.
    calls: the format of calls that its channels read; None: calls are part of the content.
    is_taught(template): True if a chat template uses the format.
    opening(before, goes_on): the beginning of the answer that the prompt contains already. `before`
        is the end of the prompt, or, if the answer `goes_on`, the text that there is of it.
    channels(opening, functions): the channels of an output after `opening`, which may call
        `functions`. Their `pieces(text, ends)` depend on the text alone, not on how it is cut, and
        are the text without tags and headers of messages; `field` is the field of text that would
        come next, "name" if that would be part of a header.
    around(opening, ids, calls): the grammar of outputs, in Lark's notation, whose content, or
        calls, are `@body`; `ids` are those of tags that are single tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

from specrouter.config.server import ReasoningParser
from specrouter.http.reasoning.harmony import Harmony, HarmonyChannels
from specrouter.http.reasoning.think import Think, ThinkChannels

ReasoningFormat = Think | Harmony
Channels = ThinkChannels | HarmonyChannels

FORMATS: Mapping[str, tuple[ReasoningFormat, ...]] = {
    "harmony": (Harmony(),),
    "think": (
        Think("<think>", "</think>"),
        Think("<|channel>thought\n", "<channel|>"),
        Think("<seed:think>", "</seed:think>"),
        Think("[THINK]", "[/THINK]"),
    ),
}


def reasoning_of(name: ReasoningParser, template: str) -> ReasoningFormat | None:
    """Return the first known format that the template uses; None: an output is all content.

    For a format that was set by name, it is one of its variants, by default the first.
    """
    known = FORMATS.get(name, ()) if name != "auto" else sum(FORMATS.values(), ())
    taught = (one for one in known if one.is_taught(template))
    return next(taught, None if name == "auto" else next(iter(known), None))
