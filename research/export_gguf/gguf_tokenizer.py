"""A checkpoint's tokenizer, as GGUF has it.

Contract: byte-level BPE of a `tokenizer.json`. Any other is refused with `ConfigError`: text that
would be split otherwise is no comparison. llama.cpp knows the splitting in front of BPE by name.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from modelpool.errors import ConfigError
from research.export_gguf.llama_tensors import FIELD

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # GGUF's token types
_DIGITS = [{"type": "Digits", "individual_digits": True}]
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BY_PATTERN = {
    rf"{_SHORT}|{_LETTERS}|\p{{N}}{{1,3}}|{_MARKS}": "llama-bpe",
    rf"{_SHORT}|{_LETTERS}|\p{{N}}|{_MARKS}": "qwen2",
    # The bundled family's. What differs: several spaces in front of a digit.
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "smollm",
}


@dataclass(frozen=True, kw_only=True)
class GgufTokenizer:
    """`types`: of each token; `pre`: llama.cpp's name of the splitting; `adds_bos`: to a prompt
    that is text."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    pre: str
    adds_bos: bool
    chat_template: str | None


def read_tokenizer(directory: Path, vocab_size: int, pre: str | None) -> GgufTokenizer:
    """
    Args:
        vocab_size: rows of the embedding; ids beyond the tokenizer's are written as unused.
        pre: llama.cpp's name of the splitting, for a tokenizer whose name is not known here.

    Raises:
        ConfigError: for what llama.cpp would read as another tokenizer.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(FIELD, f"{str(directory)!r} has no tokenizer.json")
    serialised = json.loads(file.read_text(encoding="utf-8"))
    model = serialised["model"]
    if model.get("type") != "BPE" or not _is_byte_level(serialised):
        raise ConfigError(FIELD, f"{str(file)!r} is no byte-level BPE, which alone is written")
    if serialised.get("normalizer") is not None:
        raise ConfigError(FIELD, f"{str(file)!r} has a normalizer, which llama.cpp would not apply")
    tokens, types = _vocabulary(serialised, vocab_size)
    return GgufTokenizer(
        tokens=tokens,
        types=types,
        merges=tuple(one if isinstance(one, str) else " ".join(one) for one in model["merges"]),
        pre=pre or _pre(serialised["pre_tokenizer"], file),
        adds_bos=_adds_bos(file),
        chat_template=_chat_template(directory),
    )


def _vocabulary(
    serialised: Mapping[str, Any], vocab_size: int
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [UNUSED] * vocab_size
    added = {one["content"]: one for one in serialised.get("added_tokens") or ()}
    known = {**serialised["model"]["vocab"], **{text: one["id"] for text, one in added.items()}}
    for text, index in known.items():
        if index >= vocab_size:
            raise ConfigError(FIELD, f"token {index} has no row in an embedding of {vocab_size}")
        tokens[index], types[index] = text, NORMAL
        if text in added:
            types[index] = CONTROL if added[text]["special"] else USER_DEFINED
    return tuple(tokens), tuple(types)


def _is_byte_level(serialised: Mapping[str, Any]) -> bool:
    return any(one["type"] == "ByteLevel" for one in _steps(serialised.get("pre_tokenizer")))


def _steps(pre_tokenizer: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if pre_tokenizer is None:
        return []
    if pre_tokenizer["type"] == "Sequence":
        return list(pre_tokenizer["pretokenizers"])
    return [pre_tokenizer]


def _pre(pre_tokenizer: Mapping[str, Any], file: Path) -> str:
    """llama.cpp's name. Raises `ConfigError` for a splitting without one."""
    *before, last = _steps(pre_tokenizer)
    name = None
    if last["type"] == "ByteLevel" and not last.get("add_prefix_space"):
        if last.get("use_regex", True):
            name = "gpt-2" if not before else "smollm" if before == _DIGITS else None
        elif len(before) == 1 and before[0]["type"] == "Split":
            name = _BY_PATTERN.get(before[0]["pattern"].get("Regex", ""))
    if name is None:
        reason = (
            f"{str(file)!r} splits text in a way whose name in llama.cpp is not known: say --pre"
        )
        raise ConfigError(FIELD, reason)
    return name


def _adds_bos(file: Path) -> bool:
    """Whether an empty text has a token."""
    return len(Tokenizer.from_file(str(file)).encode("").ids) > 0


def _chat_template(directory: Path) -> str | None:
    file, settings = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if settings.is_file():
        template = json.loads(settings.read_text(encoding="utf-8")).get("chat_template")
        return template if isinstance(template, str) else None
    return None
