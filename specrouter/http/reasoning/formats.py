"""The formats of reasoning that are known, and which one a chat template speaks of.

Contract: a format is pure, and has

    tags: in the text; some are special tokens, which texts do not show by themselves.
    calls: the form of calls that its channels read; None: they are part of the content.
    is_taught(template): whether a chat template speaks of it.
    opening(before, goes_on): what the answer begins with in the prompt that ends so; `before` of an
        answer that `goes_on` is what there is of it.
    channels(opening, functions): of an output behind it, which may call these. Their
        `pieces(text, ends)` hang on the text alone, not on how it is cut, and are the text but for
        tags and headers of messages; `field` is that of text that would come now, "name" where
        that would be no text.
    around(opening, ids, calls): the grammar of outputs, in Lark's notation, whose content, or
        calls, are `@body`; `ids` are those of tags that are tokens of their own.
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
    """The first that the template speaks of; of one that is asked for by name, else its usual one.
    None: an output is all content."""
    known = FORMATS.get(name, ()) if name != "auto" else sum(FORMATS.values(), ())
    taught = (one for one in known if one.is_taught(template))
    return next(taught, None if name == "auto" else next(iter(known), None))
