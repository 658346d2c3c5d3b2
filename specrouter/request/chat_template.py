"""ChatTemplate: the conversion of a conversation to prompt tokens.

Contract: the configured template, else the tokenizer's own, else `DEFAULT_TEMPLATE`. If a template
refuses a conversation, the request is at fault. A template's text contains the special tokens that
it needs, so none are added to it; `DEFAULT_TEMPLATE` contains none, so they are.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from modelpool.errors import ConfigError
from specrouter.request.conversation import Conversation
from specrouter.request.literal_text import LiteralText
from specrouter.request.params import RequestError

# For models without a chat format: a transcript in plain text.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if not loop.first %}{{ '\\n\\n' }}{% endif %}"
    "{{ message.role | capitalize }}: {{ message.content }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n\\nAssistant:' }}{% endif %}"
)
_SETTING = "server.chat_template"
_render: Any = render_jinja_template  # its annotation is wrong
# Names that a client must not set: arguments of this module, and names that are no variables.
_RESERVED = {"messages", "self", "tokenize", *inspect.signature(_render).parameters} - {"kwargs"}


class ChatTemplate:
    """The template of the served model.

    Args:
        tokenizer: the target's tokenizer.
        file: the configured template; None: the tokenizer's own, or the default.
        literal_user_text: contents of `user` and `tool` hold no special tokens: see `LiteralText`.

    Raises:
        ConfigError: the file cannot be read, or is no template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        file: Path | None,
        literal_user_text: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._literal = LiteralText(tokenizer) if literal_user_text else None
        own = tokenizer.chat_template
        self._adds_special_tokens = file is None and own is None
        # None means the tokenizer's.
        self._template = DEFAULT_TEMPLATE if self._adds_special_tokens else None
        if file is not None:
            self._template = _read(file)
            self._try_out()
        self.source = str(self._template or own)  # several templates by name as one text
        self._knows_developers = "developer" in self.source

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the prompt of messages alone. Raises `RequestError`, which names the fault."""
        return self.token_ids(_conversation(messages), False, lambda text: None)

    def token_ids(
        self,
        conversation: Conversation,
        with_tools: bool,
        check: Callable[[str], None],
    ) -> list[int]:
        """Return the prompt of a conversation.

        Args:
            conversation: the messages, and variables of the template.
            with_tools: whether the template gets the tools.
            check: raises `RequestError` for a text that is too long to be tokenized.

        Raises:
            RequestError: names a message or another field of the conversation.
        """
        goes_on = bool(conversation.continue_final_message)
        answers = conversation.add_generation_prompt
        if goes_on and answers:
            raise RequestError("add_generation_prompt", "contradicts continue_final_message")
        variables = {
            **_variables(conversation),
            "tools": (conversation.tools or None) if with_tools else None,
            "documents": conversation.documents,
            "add_generation_prompt": not goes_on if answers is None else answers,
            "continue_final_message": goes_on,
        }
        conversation.check_keys(self._reads)
        text = self._text(conversation, variables)
        written = text if self._literal is None else self._literal.put_back(text)
        check(written)
        special = conversation.add_special_tokens
        if special is None:
            special = self._adds_special_tokens
        if self._literal is not None and written != text:
            return self._literal.token_ids(text, special)
        return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])

    def _reads(self, name: str) -> bool:
        """Return whether the word occurs in the template, which approximates whether it is read."""
        return re.search(rf"\b{re.escape(name)}\b", self.source) is not None

    def _text(self, conversation: Conversation, variables: dict[str, Any]) -> str:
        """Return the text in the first form that the template accepts.

        Most templates expect the arguments of a call as an object, and test whether there is a
        content. Others (DeepSeek's) put text before and after the arguments, or test whether the
        content is none.
        """
        forms = list(itertools.product((False, True), repeat=2))
        if not any(message.tool_calls for message in conversation.messages):
            forms = forms[:1]
        failure: RequestError | None = None
        for null_contents, text_arguments in forms:
            turns = conversation.turns(null_contents, text_arguments)
            for turn in turns:
                if turn["role"] == "developer" and not self._knows_developers:
                    turn["role"] = "system"  # the earlier name of the role
                if self._literal is not None and turn["role"] in ("user", "tool"):
                    turn["content"] = self._literal.taken_out(turn["content"])
                reasons = turn.get("reasoning_content") or turn.get("reasoning")
                if reasons:  # newer transformers set these names too, which templates read
                    takes_one = turn.get("tool_calls") and turn.get("content")  # gpt-oss
                    turn |= {"reasoning_content": reasons, "thinking": "" if takes_one else reasons}
            try:
                return self._rendered(turns, variables)
            except RequestError as error:
                failure = failure or error
        assert failure is not None
        raise failure

    def _rendered(self, turns: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        # Not by `apply_chat_template`, which leaves out variables that are None.
        try:
            template = self._tokenizer.get_chat_template(self._template, variables.get("tools"))
            known = {**self._tokenizer.special_tokens_map, **variables}
            [text], _ = _render([turns], chat_template=template, **known)
            assert isinstance(text, str)
            text.encode()  # fails for half a surrogate pair
        except Exception as error:  # a template is a program, and these are its inputs
            reason = f"the chat template cannot take them: {str(error)[:200]}"
            raise RequestError("messages", reason) from error
        return text

    def _try_out(self) -> None:
        try:
            self._rendered([{"role": "user", "content": "a"}], {"add_generation_prompt": True})
        except RequestError as error:
            raise ConfigError(_SETTING, f"is no usable template: {error.__cause__}") from error


def _conversation(messages: Sequence[Mapping[str, Any]]) -> Conversation:
    said = [dict(one) if isinstance(one, Mapping) else one for one in messages]
    try:
        return Conversation.model_validate({"messages": said})
    except ValidationError as error:
        first = error.errors()[0]
        parts = (f".{part}" if isinstance(part, str) else f"[{part}]" for part in first["loc"])
        raise RequestError("".join(parts).removeprefix("."), first["msg"]) from error


def _variables(conversation: Conversation) -> dict[str, Any]:
    """Return the client's own variables. Templates test for their presence: None is left out."""
    given = conversation.chat_template_kwargs or {}
    for name in given:
        if name in _RESERVED:
            raise RequestError("chat_template_kwargs", f"must not hold {name!r}")
    effort = conversation.reasoning_effort
    return given if effort is None else {**given, "reasoning_effort": effort}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(_SETTING, f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(_SETTING, f"{file} is not UTF-8 text: {error}") from error
