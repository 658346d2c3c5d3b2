"""LiteralText: tokens of a conversation's text in which user text never becomes a special token.

Contract: a special token in a content is taken out before the template sees it, and its text is put
back where the template's own special tokens are known already. For that one pass of the tokenizer
those are spelled with random names: in a second tokenizer, which differs from the first in nothing
else. A text in which no content holds a special token is read by the first, as usual.

Tokens that a tokenizer has added without marking them as special (Qwen's `<tool_call>`) stay
tokens.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from modelpool.errors import ConfigError

_SETTING = "server.literal_user_text"


class LiteralText:
    """The second tokenizer. Raises `ConfigError` for a tokenizer that cannot be copied so."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(_SETTING, "needs a tokenizer with a tokenizer.json")
        added = tokenizer.added_tokens_decoder.items()
        ids = {token.content: one for one, token in added if token.special}
        # The template sees only the stand-ins for user text, and may reveal them.
        own, written = secrets.token_hex(16), secrets.token_hex(16)
        self._own = {text: f"{own}x{one}x" for text, one in ids.items()}
        self._written = {text: f"{written}x{one}x" for text, one in ids.items()}
        self._special, self._stand_in = map(_any_of, (self._own, self._written.values()))
        self._text_of = {stand_in: text for text, stand_in in self._written.items()}
        try:
            self._tokenizer = _respelled(backend, self._own)
        except Exception as error:  # the tokenizers library raises bare exceptions
            reason = f"is not possible with this tokenizer: {error}"
            raise ConfigError(_SETTING, reason) from error
        for text, own in self._own.items():
            if self._tokenizer.token_to_id(own) != ids[text]:
                raise ConfigError(_SETTING, f"is not possible with this tokenizer's {text!r}")

    def taken_out(self, content: str) -> str:
        """Return the content for the template, with stand-ins for special tokens."""
        return self._special.sub(lambda found: self._written[found[0]], content)

    def put_back(self, text: str) -> str:
        return self._stand_in.sub(lambda found: self._text_of[found[0]], text)

    def token_ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the tokens of a template's output for contents with stand-ins."""
        respelled = self._special.sub(lambda found: self._own[found[0]], text)
        read = self._tokenizer.encode(self.put_back(respelled), None, False, add_special_tokens)
        ids: list[int] = read.ids
        return ids


def _any_of(texts: Any) -> re.Pattern[str]:
    """Return a pattern of all texts, the longest first as in tokenizers."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def _respelled(backend: Tokenizer, names: dict[str, str]) -> Tokenizer:
    whole = json.loads(backend.to_str())
    whole["truncation"] = whole["padding"] = None
    model = whole["model"]
    for token in whole["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(text, text): one for text, one in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(text, text), *rest] for text, *rest in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return Tokenizer.from_str(json.dumps(whole))
