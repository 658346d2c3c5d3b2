"""A token's text and bytes, in vocabularies of bytes and of SentencePiece."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from specrouter.http.token_texts import TokenTexts
from test_support.factories import make_tokenizer


def test_the_bytes_of_tokens_are_those_of_the_text_they_cut(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    texts = TokenTexts(tokenizer)
    text = "héllo 中文 😀\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert any("\ufffd" in texts.text(token) for token in ids)  # a token within a character
    assert b"".join(map(texts.data, ids)).decode() == text


class SentencePieces:
    """As `transformers` decodes them: a word that begins a text loses its space."""

    pieces = ("\u2581the", "<0xE4>", "re", "\u2581", "\u2581\u2581\u2581")

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.pieces[token]

    def decode(self, ids: list[int], **_: Any) -> str:
        return {0: "the", 1: "\ufffd", 2: "re", 3: "", 4: "  "}[ids[0]]


def test_a_sentencepiece_keeps_its_space_and_its_byte() -> None:
    texts = TokenTexts(cast(PreTrainedTokenizerBase, SentencePieces()))
    assert [texts.text(token) for token in range(5)] == [" the", "\ufffd", "re", " ", "   "]
    assert [texts.data(token) for token in range(5)] == [b" the", b"\xe4", b"re", b" ", b"   "]
