"""ToolFormat: how a family of models writes its calls, which its chat template teaches it.

Contract: a call is a JSON object with a name and arguments; formats differ in what stands around
it and in the name of the arguments.
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
    """
    Attributes:
        tag: what stands before a call's object.
        end_tag: what stands behind it; empty for nothing.
        is_tagged: no object is a call without the tag. Else one at the text's beginning is, or
            right behind another call, if it names a function of the request.
        separator: between two calls, as the model writes it.
        padding: between tags and the object, as the model writes it.
        arguments: the name of the arguments, as the model writes it; both are read.
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
        """Behind the arguments of a call."""
        return "}" + (self.padding + self.end_tag if self.is_tagged else "")

    def head(self, name: str) -> str:
        """Before the arguments of a call of this function."""
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

# In templates that have Hermes' tag, but no JSON within it: Qwen3-Coder's and GLM's.
_NO_JSON_WITHIN = ("<function=", "<arg_key>")
# With these words Llama 3's templates refuse a turn with several calls.
_SINGLE_CALLS = "only supports single tool-call"


def format_of(template: str) -> ToolFormat | None:
    """What a chat template teaches; None where it teaches nothing that is known here."""
    if HERMES.tag in template:
        return None if any(mark in template for mark in _NO_JSON_WITHIN) else HERMES
    if LLAMA3_JSON.tag in template or "Environment: ipython" in template:
        return LLAMA3_JSON
    return None


def added_tags(tags: Collection[str], tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Ids of the tags that are tokens of their own, or hold a special one."""
    return {
        token.content: one
        for one, token in tokenizer.added_tokens_decoder.items()
        if token.content in tags or (token.special and any(token.content in tag for tag in tags))
    }


def has_single_calls(template: str) -> bool:
    """Whether a chat with several calls in one turn could not go on."""
    return _SINGLE_CALLS in template
