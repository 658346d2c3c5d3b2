"""Comparison of tokenizers: members exchange token ids, so an id must mean the same in all.

Tokenizers are compared by content, never by `vocab_size`: families pad their embeddings
differently. Chat templates, padding, truncation, the tokens around a prompt and the ids that end a
text are not compared: the target's are used for all members.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from modelpool.errors import ConfigError

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
UNUSED_IDS = "unused_token_ids"  # an option of tokenizers of GGUF files
_COMPARED = ("model", "normalizer", "pre_tokenizer", "decoder", "added_tokens")


def load_tokenizer(
    directory: Path, *, field: str, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint; raise `ConfigError` for `{field}.source`."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(directory), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        reason = f"cannot load a tokenizer from {str(directory)!r}: {error}"
        raise ConfigError(f"{field}.source", reason) from error
    return tokenizer


def id_counts(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Return the largest token id plus one, and the same of the ids that every model must embed.

    These are all but added special tokens other than BOS and EOS, such as those of images, for
    which a text model may have no rows.
    """
    added = tokenizer.added_tokens_decoder
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    ids = tokenizer.get_vocab().values()
    spare = {one for one, token in added.items() if token.special and one not in used}
    return 1 + max(ids), 1 + max(one for one in ids if one not in spare)


def files_fingerprint(directory: Path) -> str:
    """Return a hash of the tokenizer's files: if it is equal, no second tokenizer is built."""
    digest = hashlib.sha256()
    for name in _FILES:
        file = directory / name
        if file.is_file():
            content = file.read_bytes()
            digest.update(f"{name}:{len(content)}:".encode())
            digest.update(content)
    return digest.hexdigest()


def tokenizer_difference(
    first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase
) -> str | None:
    """Return in words why two tokenizers map text to different ids, or None if they do not."""
    vocabulary = _vocabulary_difference(first, second)
    if vocabulary is not None:
        return vocabulary
    ours, theirs = _behaviour(first), _behaviour(second)
    differing = [part for part in _COMPARED if ours.get(part) != theirs.get(part)]
    if differing:
        return f"same vocabulary, but a different {' and '.join(differing)}"
    return None


def _vocabulary_difference(
    first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase
) -> str | None:
    ours, theirs = first.get_vocab(), second.get_vocab()
    if ours == theirs:
        return None
    if len(ours) != len(theirs):
        return f"{len(ours)} ids and {len(theirs)} ids"
    token = min(
        (token for token, index in ours.items() if theirs.get(token) != index),
        key=lambda token: ours[token],
    )
    return f"id {ours[token]} is {token!r} in one and {_token(theirs, ours[token])!r} in the other"


def _token(vocabulary: dict[str, int], index: int) -> str | None:
    return next((token for token, place in vocabulary.items() if place == index), None)


def _behaviour(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the parts of the serialised backend on which the meaning of an id depends."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer in Python: only its class and its special ids are known
        return {"model": type(tokenizer).__name__, "added_tokens": tokenizer.all_special_ids}
    serialised = json.loads(backend.to_str())
    parts = {part: serialised.get(part) for part in _COMPARED}
    parts["added_tokens"] = sorted(
        (entry["id"], entry["content"], entry["special"]) for entry in parts["added_tokens"] or []
    )
    return parts
