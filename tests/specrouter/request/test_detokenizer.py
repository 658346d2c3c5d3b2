"""However a text is cut into tokens, it streams to what decoding it at once gives."""

import copy
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specrouter.request.detokenizer import Detokenizer
from specrouter.request.params import SamplingParams
from test_support.factories import make_tokenizer
from tests.pure import few

ALPHABET = st.one_of(
    st.sampled_from("aä ß\n.e"), st.sampled_from("中文字かな한글"), st.sampled_from("😀🎉👩🏽‍💻é")
)
TEXTS = st.text(ALPHABET, max_size=20)
KNOWN_PIECES = (*"aeinrstFP.", "\u2581", "\u2581a", "\u2581is", "\u2581Paris", "France", "中", "é")


class Pieces:
    """A tokenizer whose ids are arbitrary pieces of bytes; 0 is a special id."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = [b"", *pieces]

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        assert options == {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return b"".join(self.pieces[token] for token in ids).decode(errors="replace")


def stream(
    pieces: Sequence[bytes], stop: Sequence[str] = (), min_tokens: int = 0
) -> tuple[list[str], Detokenizer]:
    """What each token brought, the end's rest last; nothing follows a stop text."""
    params = SamplingParams(stop=tuple(stop), min_tokens=min_tokens)
    detok = Detokenizer(cast(PreTrainedTokenizerBase, Pieces(pieces)), params)
    shown: list[str] = []
    for token in range(1, len(pieces) + 1):
        shown.append(detok.push(token))
        if detok.stopped:
            break
    return [*shown, detok.finish()], detok


def cut(data: bytes, borders: Sequence[int]) -> list[bytes]:
    ends = sorted({border % (len(data) + 1) for border in borders} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(ends)]


@functools.cache
def byte_level() -> PreTrainedTokenizerBase:
    with TemporaryDirectory() as directory:
        return make_tokenizer(Path(directory))


@functools.cache
def byte_fallback() -> PreTrainedTokenizerBase:
    """As Llama 2's: what the vocabulary lacks is bytes, and a text's first space is dropped."""
    single = [piece for piece in KNOWN_PIECES if len(piece) == 1]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *single]
    merges: list[tuple[str, str]] = []
    for piece in KNOWN_PIECES:
        for end in range(2, len(piece) + 1):
            merges.append((piece[: end - 1], piece[end - 1]))
            pieces += [part for part in {piece[end - 1], piece[:end]} if part not in pieces]
    vocab = {piece: token for token, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made: PreTrainedTokenizerBase = cast(Any, PreTrainedTokenizerFast)(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    return made


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids


def id_of(tokenizer: PreTrainedTokenizerBase, piece: str) -> int:
    return cast(int, tokenizer.convert_tokens_to_ids(piece))


def decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    text = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def continued(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], ids: Sequence[int]) -> str:
    detok = Detokenizer(tokenizer, SamplingParams(), prompt)
    shown = [detok.push(token) for token in ids] + [detok.finish()]
    assert "".join(shown) == detok.text
    return detok.text


@given(TEXTS, st.lists(st.integers(0, 200), max_size=40))
@settings(max_examples=few(150), deadline=None)
def test_any_cut_streams_to_the_whole_text(text: str, borders: list[int]) -> None:
    shown, detok = stream(cut(text.encode(), borders))
    assert "".join(shown) == detok.text == text
    assert not any("\ufffd" in part for part in shown)


@given(TEXTS)
@settings(max_examples=few(100), deadline=None)
def test_a_real_tokenizers_ids_stream_to_their_decoding(text: str) -> None:
    tokenizer = byte_level()
    ids = tokenizer(text)["input_ids"]
    detok = Detokenizer(tokenizer, SamplingParams())
    shown = [detok.push(token) for token in ids] + [detok.finish()]
    assert "".join(shown) == text
    assert not any("\ufffd" in part for part in shown)


@given(
    TEXTS,
    st.lists(st.integers(0, 200), max_size=40),
    st.lists(st.text(ALPHABET, min_size=1, max_size=3), min_size=1, max_size=3),
)
@settings(max_examples=few(150), deadline=None)
def test_the_text_ends_before_the_first_stop_text(
    text: str, borders: list[int], stop: list[str]
) -> None:
    shown, detok = stream(cut(text.encode(), borders), stop)
    assert "".join(shown) == detok.text
    assert text.startswith(detok.text)
    assert not any(end in detok.text for end in stop)
    assert detok.stopped == any(end in text for end in stop)
    assert detok.stopped or detok.text == text


@given(TEXTS, st.integers(0, 60))
@settings(max_examples=few(200), deadline=None)
def test_byte_fallback_streams_to_the_decoding_of_all_ids(text: str, end: int) -> None:
    tokenizer = byte_fallback()
    ids = ids_of(tokenizer, text)
    assert continued(tokenizer, (), ids) == decoded(tokenizer, ids) == text
    some = continued(tokenizer, (), ids[:end])
    whole = some.rstrip("\ufffd")
    starts = [decoded(tokenizer, ids[:count]) for count in range(end + 1)]
    assert whole == [start for start in starts if "\ufffd" not in start][-1]
    assert len(some) - len(whole) <= 3  # the bytes of half a character


@given(TEXTS, st.integers(0, 60))
@settings(max_examples=few(200), deadline=None)
def test_the_text_goes_on_after_the_prompt(text: str, border: int) -> None:
    tokenizer = byte_fallback()
    ids = ids_of(tokenizer, text)
    prompt, rest = ids[:border], ids[border:]
    before = decoded(tokenizer, prompt)
    if not before.endswith("\ufffd"):
        assert before + continued(tokenizer, prompt, rest) == text


@pytest.mark.parametrize(
    ("pieces", "stop", "shown"),
    [
        ([b"a", "\u00e9".encode(), "\U0001f600".encode(), b"b"], [], ["a", "é", "😀", "b", ""]),
        ([b"a", b"\xc3", b"\xa9b"], [], ["a", "", "éb", ""]),
        ([b"a", b"\xc3"], [], ["a", "", "\ufffd"]),
        ([b"one E", b"N", b"D two"], ["END"], ["one ", "", "", ""]),
        ([b"E", b"N", b"E", b"X"], ["END"], ["", "", "EN", "EX", ""]),
        ([b"one E", b"N"], ["END"], ["one ", "", "EN"]),
    ],
    ids=[
        "whole characters at once",
        "half a character waits for its other half",
        "half a character at the end is broken",
        "a stop text across tokens is never shown",
        "what cannot be a stop text any more is shown",
        "what is held back at the end is part of the text",
    ],
)
def test_text_is_shown_as_soon_as_it_is_certain(
    pieces: list[bytes], stop: list[str], shown: list[str]
) -> None:
    assert stream(pieces, stop)[0] == shown


@pytest.mark.parametrize(("keep", "text"), [(False, "one "), (True, "one END")])
def test_a_stop_text_is_kept_where_asked_and_named(keep: bool, text: str) -> None:
    pieces = cast(PreTrainedTokenizerBase, Pieces([b"one E", b"N", b"D two"]))
    detok = Detokenizer(pieces, SamplingParams(stop=("x", "END"), include_stop_str_in_output=keep))
    assert "".join(map(detok.push, (1, 2, 3))) == detok.text == text
    assert detok.stopped_by == "END"


def test_some_special_tokens_are_text_where_others_are_skipped() -> None:
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.add_tokens([AddedToken("<tool_call>", special=True)])
    shown = id_of(tokenizer, "<tool_call>")
    ids = [*ids_of(tokenizer, "one "), shown, tokenizer.eos_token_id, *ids_of(tokenizer, "two")]
    for ids_shown, text in (((shown,), "one <tool_call>two"), ((), "one two")):
        detok = Detokenizer(tokenizer, SamplingParams(shown_special_token_ids=ids_shown))
        assert "".join([*map(detok.push, ids), detok.finish()]) == text


def test_special_tokens_are_text_where_asked() -> None:
    tokenizer = byte_level()
    special = tokenizer.eos_token_id
    for skip, text in ((True, ""), (False, tokenizer.eos_token)):
        assert (
            Detokenizer(tokenizer, SamplingParams(skip_special_tokens=skip)).push(special) == text
        )


@pytest.mark.parametrize(
    ("pieces", "stop", "min_tokens", "text", "stopped_by"),
    [
        (["a", "E", "b", "E", "c"], ["E"], 1, "a", "E"),
        (["a", "E", "b", "E", "c"], ["E"], 2, "aEb", "E"),
        (["a", "E", "b", "E", "c"], ["E"], 4, "aEbEc", None),
        (["a", "E", "N", "c"], ["EN"], 2, "a", "EN"),  # its end comes later
        (["E", "N", "c"], ["END", "N"], 2, "ENc", None),  # not one that is held back for another
        (["E", "E", "E", "c"], ["EE"], 2, "E", "EE"),
    ],
)
def test_no_stop_text_ends_the_text_that_is_complete_with_the_least_tokens(
    pieces: list[str], stop: list[str], min_tokens: int, text: str, stopped_by: str | None
) -> None:
    detok = stream([piece.encode() for piece in pieces], stop, min_tokens)[1]
    assert (detok.text, detok.stopped_by) == (text, stopped_by)
