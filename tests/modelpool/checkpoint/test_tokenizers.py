"""Tokenizers are equal when an id means the same text in both."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelpool.checkpoint.tokenizers import files_fingerprint, load_tokenizer, tokenizer_difference
from modelpool.errors import ConfigError
from test_support.factories import make_tokenizer

FIELD = "pool.models[0]"


def difference(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> str | None:
    """How a tokenizer differs from one whose tokenizer.json was changed."""
    for name in ("one", "two"):
        make_tokenizer(tmp_path / name)
    file = tmp_path / "two" / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    assert files_fingerprint(tmp_path / "one") != files_fingerprint(tmp_path / "two")
    return tokenizer_difference(
        load_tokenizer(tmp_path / "one", field=FIELD), load_tokenizer(tmp_path / "two", field=FIELD)
    )


def swap_ids(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def drop_a_token(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    del vocabulary[max(vocabulary, key=vocabulary.get)]
    content["model"]["merges"].pop()


def add_normalizer(content: dict[str, Any]) -> None:
    content["normalizer"] = {"type": "Lowercase"}


def reverse_merges(content: dict[str, Any]) -> None:
    content["model"]["merges"] = content["model"]["merges"][::-1]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (swap_ids, "'a'"),
        (drop_a_token, "320 ids and 319 ids"),
        (add_normalizer, "normalizer"),
        (reverse_merges, "model"),
    ],
)
def test_a_change_of_meaning_is_told(change: Any, word: str, tmp_path: Path) -> None:
    told = difference(tmp_path, change)
    assert told is not None
    assert word in told


def test_a_missing_tokenizer_names_the_source(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^pool\.models\[0\]\.source: "):
        load_tokenizer(tmp_path, field=FIELD)
