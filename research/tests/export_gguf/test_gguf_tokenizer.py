"""Tokenizers in GGUF: their splitting has a name in llama.cpp, or they are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelpool.checkpoint.bundled import bundled_root
from modelpool.errors import ConfigError
from research.export_gguf.gguf_tokenizer import read_tokenizer

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def saved(folder: Path, **changes: Any) -> Path:
    """The bundled family's tokenizer with other parts."""
    serialised = json.loads((bundled_root() / "tiny-1m" / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**serialised, **changes}))
    return folder


def split(pattern: str) -> dict[str, Any]:
    parts = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return sequence(parts, {**BYTES, "use_regex": False})


def sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


@pytest.mark.parametrize(
    ("pre_tokenizer", "name"),
    [
        (split(LLAMA_3), "llama-bpe"),
        (split(LLAMA_3.replace("{1,3}", "")), "qwen2"),
        (BYTES, "gpt-2"),
        (sequence({"type": "Digits", "individual_digits": True}, BYTES), "smollm"),
    ],
)
def test_known_ways_of_splitting_have_llama_cpp_s_name(
    pre_tokenizer: dict[str, Any], name: str, tmp_path: Path
) -> None:
    assert read_tokenizer(saved(tmp_path, pre_tokenizer=pre_tokenizer), 4096, None).pre == name


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"pre_tokenizer": split(r"\w+")}, "say --pre"),
        ({"pre_tokenizer": {**BYTES, "add_prefix_space": True}}, "say --pre"),
        ({"pre_tokenizer": None}, "no byte-level BPE"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "no byte-level BPE"),
        ({"normalizer": {"type": "NFC"}}, "has a normalizer"),
    ],
)
def test_others_are_refused(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^export-gguf: .*{complaint}"):
        read_tokenizer(saved(tmp_path, **changes), 4096, None)


def test_a_name_that_is_said_is_taken(tmp_path: Path) -> None:
    folder = saved(tmp_path, pre_tokenizer=split(r"\w+"))
    assert read_tokenizer(folder, 4096, "tekken").pre == "tekken"


def test_rows_beyond_the_tokenizer_are_unused_and_missing_ones_are_refused(tmp_path: Path) -> None:
    found = read_tokenizer(saved(tmp_path), 4100, None)
    assert found.tokens[4096:] == ("[PAD4096]", "[PAD4097]", "[PAD4098]", "[PAD4099]")
    assert found.types[4095:] == (1, 5, 5, 5, 5)
    with pytest.raises(ConfigError, match=r"token \d+ has no row in an embedding of 4000"):
        read_tokenizer(tmp_path, 4000, None)


def test_a_beginning_that_the_tokenizer_adds_and_a_template_come_along(tmp_path: Path) -> None:
    bos = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    special = {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
    template = {
        "type": "TemplateProcessing",
        "single": [bos, text],
        "pair": [bos, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": special},
    }
    folder = saved(tmp_path, post_processor=template)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ x }}"}')
    found = read_tokenizer(folder, 4096, None)
    assert found.adds_bos
    assert found.chat_template == "{{ x }}"
    (folder / "chat_template.jinja").write_text("{{ y }}")
    assert read_tokenizer(folder, 4096, None).chat_template == "{{ y }}"
