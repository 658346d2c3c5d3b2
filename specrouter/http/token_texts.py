"""TokenTexts: a single token's text and bytes, as log-probabilities show them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

# Byte-level vocabularies spell each byte as a character.
_byte_characters: Callable[[], dict[int, str]] = bytes_to_unicode
_BROKEN = "\ufffd"  # an incomplete character decodes to it
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's fallback
_SPACE = "\u2581"  # SentencePiece's space


class TokenTexts:
    """Cache of the texts and bytes of tokens; its size is bounded by the vocabulary."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._byte_of = {character: byte for byte, character in _byte_characters().items()}
        self.text = functools.cache(self._text)
        self.data = functools.cache(self._data)

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, which texts omit by default."""
        added = self._tokenizer.added_tokens_decoder
        return frozenset(one for one, token in added.items() if token.special)

    def of(self, tokens: list[int]) -> str:
        """Return the text of several tokens, special ones included."""
        text = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)  # it is a list only for several sequences
        return text

    def _text(self, token: int) -> str:
        text, piece = self.of([token]), self._piece(token)
        spaces = len(piece) - len(piece.lstrip(_SPACE))  # some decoders drop the first one
        return " " * (spaces - (len(text) - len(text.lstrip(" ")))) + text

    def _data(self, token: int) -> bytes:
        text = self.text(token)
        if _BROKEN not in text:
            return text.encode()
        piece = self._piece(token)
        fallback = _BYTE.fullmatch(piece)
        if fallback is not None:
            return bytes([int(fallback[1], 16)])
        if all(character in self._byte_of for character in piece):
            return bytes(self._byte_of[character] for character in piece)
        return text.encode()

    def _piece(self, token: int) -> str:
        return str(self._tokenizer.convert_ids_to_tokens(token))
