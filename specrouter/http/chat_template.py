"""ChatTemplate: a conversation as the tokens that the model continues.

Contract: the configured template, else the tokenizer's own, else `DEFAULT`. What a template
refuses is the request's fault. A template's text holds the special tokens that it wants, so none
are added to it; `DEFAULT` holds none, so they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from modelpool.errors import ConfigError
from specrouter import RequestError
from specrouter.http.openai_fields import Conversation

# For models that know no chat: what a transcript looks like in plain text.
DEFAULT = (
    "{% for message in messages %}"
    "{% if not loop.first %}{{ '\\n\\n' }}{% endif %}"
    "{{ message.role | capitalize }}: {{ message.content }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n\\nAssistant:' }}{% endif %}"
)
_SETTING = "server.chat_template"


class ChatTemplate:
    """Raises `ConfigError` for a file that cannot be read, or is no template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, file: Path | None) -> None:
        self._tokenizer = tokenizer
        own = tokenizer.chat_template
        self._adds_special_tokens = file is None and own is None
        self._template = DEFAULT if self._adds_special_tokens else None  # None: the tokenizer's
        if file is not None:
            self._template = _read(file)
            self._try_out()
        self._knows_developers = "developer" in str(self._template or own)
        own_names = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved = {"messages", *own_names} - {"kwargs"}

    def token_ids(self, conversation: Conversation, with_tools: bool = True) -> list[int]:
        """Raises `RequestError`, naming a message or another field of the conversation."""
        turns = conversation.turns()
        for turn in turns:
            if turn["role"] == "developer" and not self._knows_developers:
                turn["role"] = "system"  # its name before
        goes_on = bool(conversation.continue_final_message)
        answers = conversation.add_generation_prompt
        if goes_on and answers:
            raise RequestError("add_generation_prompt", "contradicts continue_final_message")
        text = self._rendered(
            turns,
            [*(conversation.tools or ())] if with_tools else None,
            add_generation_prompt=not goes_on if answers is None else answers,
            continue_final_message=goes_on,
            **self._variables(conversation),
        )
        return list(
            self._tokenizer(text, add_special_tokens=self._adds_special_tokens)["input_ids"]
        )

    def _rendered(
        self,
        turns: list[dict[str, Any]],
        tools: list[dict[Any, Any] | Callable[..., Any]] | None,
        **variables: Any,
    ) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                turns, tools or None, chat_template=self._template, tokenize=False, **variables
            )
            assert isinstance(text, str)  # ids only if tokenized
            text.encode()  # fails for half a surrogate pair
        except Exception as error:  # a template is a program, and these are its inputs
            reason = f"the chat template cannot take them: {str(error)[:200]}"
            raise RequestError("messages", reason) from error
        return text

    def _variables(self, conversation: Conversation) -> dict[str, Any]:
        given = conversation.chat_template_kwargs or {}
        for name in given:
            if name in self._reserved:
                raise RequestError("chat_template_kwargs", f"must not hold {name!r}")
        return given

    def _try_out(self) -> None:
        try:
            self._rendered([{"role": "user", "content": "a"}], None, add_generation_prompt=True)
        except RequestError as error:
            raise ConfigError(_SETTING, f"is no usable template: {error.__cause__}") from error


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(_SETTING, f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(_SETTING, f"{file} is not UTF-8 text: {error}") from error
