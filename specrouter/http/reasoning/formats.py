"""The formats of reasoning that are known, and which one a chat template speaks of."""

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
