"""The prompt of a conversation, by the tokenizer's template or a plain default."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from specrouter.request.params import RequestError

# For models that know no chat: what a transcript looks like in plain text.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if not loop.first %}{{ '\\n\\n' }}{% endif %}"
    "{{ message.role | capitalize }}: {{ message.content }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n\\nAssistant:' }}{% endif %}"
)


def chat_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]
) -> list[int]:
    """The token ids that an answer to the conversation continues.

    A template's text holds the special tokens that it wants; the default's does not, so they are
    added. Raises `RequestError` for messages that the template cannot take.
    """
    if not messages:
        raise RequestError("messages", "must hold at least one message")
    template = None if tokenizer.chat_template else DEFAULT_TEMPLATE
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=template,
            add_generation_prompt=True,
            tokenize=False,
        )
        return list(tokenizer(str(text), add_special_tokens=template is not None)["input_ids"])
    except Exception as error:  # a template is a program, and these are its inputs
        reason = f"the chat template cannot take them: {str(error)[:200]}"
        raise RequestError("messages", reason) from error
