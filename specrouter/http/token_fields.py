"""The bodies of `/tokenize` and `/detokenize`, as vLLM spells them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Tag

from specrouter.http.conversation_fields import Conversation
from specrouter.http.field_types import TokenIds
from specrouter.http.fields import Fields
from specrouter.http.texts import Text


class TokenizeText(Fields):
    model: Text | None = None
    """The target's name; may be left out."""
    prompt: Text
    """The text to split into tokens."""
    add_special_tokens: bool | None = None
    """True by default."""
    return_token_strs: bool | None = None
    """The answer has the tokens' texts too."""


class TokenizeChat(Conversation):
    model: Text | None = None
    """The target's name; may be left out."""
    return_token_strs: bool | None = None
    """The answer has the tokens' texts too."""


def _tokenize_kind(body: Any) -> str:
    is_chat = "messages" in body if isinstance(body, dict) else isinstance(body, TokenizeChat)
    return "conversation" if is_chat else "one_text"


TokenizeRequest = Annotated[
    Annotated[TokenizeText, Tag("one_text")] | Annotated[TokenizeChat, Tag("conversation")],
    Discriminator(_tokenize_kind),
]


class DetokenizeRequest(Fields):
    model: Text | None = None
    """The target's name; may be left out."""
    tokens: TokenIds
    """Token ids."""
