"""ToolFormat: how a family of models writes its calls, as its chat template shows.

Contract: a call is a JSON object with a name and arguments; formats differ in the text around it
and in the key of the arguments.
Sources: the chat templates of Qwen2.5, Qwen3 and Hermes 2 Pro, and of Llama 3.1 and 3.2.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

ToolFormatName = Literal["hermes", "llama3_json"]


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """Format of the calls of a model family.

    Attributes:
        tag: text before a call's object.
        end_tag: text after it; empty if there is none.
        is_tagged: no object is a call without the tag. Otherwise, an object at the text's beginning
            or right after another call is one too, if it names a function of the request.
        separator: text between two calls, as the model writes it.
        padding: text between tags and the object, as the model writes it.
        arguments: the key of the arguments, as the model writes it; both keys are read.
    """

    name: ToolFormatName
    tag: str
    end_tag: str
    is_tagged: bool
    separator: str
    padding: str
    arguments: Literal["arguments", "parameters"]

    @property
    def tags(self) -> frozenset[str]:
        return frozenset({self.tag, self.end_tag} - {""})

    @property
    def tail(self) -> str:
        """Text after the arguments of a call."""
        return "}" + (self.padding + self.end_tag if self.is_tagged else "")

    def head(self, name: str) -> str:
        """Return the text before the arguments of a call of this function."""
        opening = self.tag + self.padding if self.is_tagged else ""
        name = json.dumps(name, ensure_ascii=False)
        return f'{opening}{{"name": {name}, "{self.arguments}": '


HERMES = ToolFormat(
    name="hermes",
    tag="<tool_call>",
    end_tag="</tool_call>",
    is_tagged=True,
    separator="\n",
    padding="\n",
    arguments="arguments",
)
LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    tag="<|python_tag|>",
    end_tag="",
    is_tagged=False,
    separator="; ",
    padding="",
    arguments="parameters",
)

FORMATS: Mapping[str, ToolFormat] = {one.name: one for one in (HERMES, LLAMA3_JSON)}

# Marks of templates with Hermes' tag, but no JSON within it: Qwen3-Coder's and GLM's.
_NO_JSON_WITHIN = ("<function=", "<arg_key>")
# With these words Llama 3's templates refuse a turn with several calls.
_SINGLE_CALLS = "only supports single tool-call"


def format_of(template: str) -> ToolFormat | None:
    """Return the format that a chat template shows, or None if it shows no known one."""
    if HERMES.tag in template:
        return None if any(mark in template for mark in _NO_JSON_WITHIN) else HERMES
    if LLAMA3_JSON.tag in template or "Environment: ipython" in template:
        return LLAMA3_JSON
    return None


def added_tags(tags: Collection[str], tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the ids of tags that are single tokens, and of special tokens within tags."""
    return {
        token.content: one
        for one, token in tokenizer.added_tokens_decoder.items()
        if token.content in tags or (token.special and any(token.content in tag for tag in tags))
    }


def has_single_calls(template: str) -> bool:
    """Return whether the template refuses a turn with several calls."""
    return _SINGLE_CALLS in template
