"""A GGUF file's configuration and tokenizer in the form of `transformers`, in a cache folder.

Contract: code that reads a checkpoint's folder can read this one; its weights stay in the file
until they are loaded (`modelpool.gguf.weights`). A fact or a tensor with which the model would
compute something else is refused with a `ConfigError` that names it.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedTokenizerFast

from modelpool.checkpoint.block_values import BLOCK_BYTES
from modelpool.checkpoint.cache_dir import cache_dir
from modelpool.checkpoint.cached_folder import cached_folder
from modelpool.checkpoint.footprint import check_served
from modelpool.checkpoint.headers import ROUNDED, Header, StoredParameter
from modelpool.checkpoint.tokenizers import load_tokenizer
from modelpool.config import Weights
from modelpool.errors import ConfigError
from modelpool.gguf.architectures import config_of
from modelpool.gguf.header import GgufHeader, GgufTensor, parts_of, path_of, read_header
from modelpool.gguf.placement import Placed, Tensors, placed_of

# Beside the configuration: the file, its tensors, and where those of the model are among them.
NAME = "gguf.json"
_FORMAT = "6"  # changes when files are described differently
# Tokens that llama.cpp recognises as ends of a text by their spelling, besides those of the file.
_TEXT_ENDS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~[",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
))  # fmt: skip
# If a vocabulary has all tokens of an entry, the last one is an ordinary token.
_NO_END = (
    ("<|return|>", "<|call|>", "<|end|>"),
    ("<|flush|>", "<|calls|>", "<|end|>"),
    ("<|tool_response>", "</s>"),
)
_DTYPES = {"F32": "float32", "F16": "float16"}  # bfloat16 for the other types
PLAIN = ("F32", "F16", "BF16")
_INT4_TYPES = ("Q4_0", "Q4_1", "Q4_K", "IQ4_NL", "IQ4_XS", "MXFP4", "Q3_K", "Q2_K")


@dataclass(frozen=True)
class Described:
    """A GGUF file as a checkpoint; `weights` is the form of the weights in the file.

    Attributes:
        folder: the configuration and the tokenizer, and this in JSON.
        file: the file, or the first part of a split one.
        tensors: its tensors. `placed`: where they are in the model, by the model's names.
    """

    folder: Path
    file: Path
    tensors: Tensors
    placed: Mapping[str, Placed]

    @property
    def weights(self) -> Weights:
        kinds = _matrix_types(self.tensors)
        if kinds & set(BLOCK_BYTES):
            return "exact"
        return "int4" if kinds & set(_INT4_TYPES) else "auto" if kinds <= set(PLAIN) else "int8"

    @property
    def headers(self) -> tuple[Header, ...]:
        return (_header(self.tensors, self.placed),)


def describe(source: str, field: str) -> Described:
    """Describe `gguf:PATH`, or a path; raise `ConfigError` for `{field}.source`."""
    try:
        first = path_of(source)
        folder = cached_folder(_folder(first), partial(_write, first, field))
        return described_in(folder)
    except ConfigError as error:
        kind = type(error)
        raise kind(f"{field}.source", error.reason) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        reason = f"cannot read {source!r}: {type(error).__name__}: {error}"
        raise ConfigError(f"{field}.source", reason) from error


def described_in(folder: Path) -> Described:
    """Return the file that a folder describes, without reading it: that takes a tenth of a second.

    Raises `OSError`, and `ValueError` if the file has changed since then.
    """
    stored = json.loads((folder / NAME).read_text(encoding="utf-8"))
    first = Path(stored["file"])
    if _folder(first).name != folder.name:
        raise ValueError("the file has changed since the pool was made")
    tensors = {one["name"]: GgufTensor.of(one) for one in stored["tensors"]}
    placed = {name: Placed.of(one) for name, one in stored["placed"].items()}
    return Described(folder, first, tensors, placed)


def tokenizer_in(folder: Path, field: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a described file; raise `ConfigError` for `{field}.source`.

    `AutoTokenizer` would find the same, and take twice as long: it makes the class's own first.
    """
    make: Any = PreTrainedTokenizerFast
    try:
        options = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        template = folder / "chat_template.jinja"
        if template.is_file():
            options["chat_template"] = template.read_text(encoding="utf-8")
        tokenizer: PreTrainedTokenizerFast = make(
            tokenizer_file=str(folder / "tokenizer.json"), **options
        )
    except Exception as error:  # the tokenizers library raises bare exceptions
        reason = f"cannot load the tokenizer in {str(folder)!r}: {error}"
        raise ConfigError(f"{field}.source", reason) from error
    return tokenizer


def _matrix_types(tensors: Tensors) -> set[str]:
    return {one.type for one in tensors.values() if len(one.shape) > 1}


def int8_weights(tensors: Tensors, placed: Mapping[str, Placed]) -> frozenset[str]:
    """Return the names of weights that are in int8 where others are in int4.

    These are weights of linear layers that have more bits in the file. Empty if the file has no
    weights in 4 bits.
    """
    if not _matrix_types(tensors) & set(_INT4_TYPES):
        return frozenset()
    return frozenset(
        name
        for name, one in placed.items()
        if _is_linear(name, one)
        and (one.columns or any(each.type not in _INT4_TYPES for each in one.tensors(tensors)))
    )


def weights_in_blocks(tensors: Tensors, placed: Mapping[str, Placed]) -> frozenset[str]:
    """Return the names of linear weights and embeddings that the file has in blocks that are kept.

    Some parts of such a weight may be in another form.
    """

    def is_kept(name: str, one: Placed) -> bool:
        parameter = StoredParameter(name, "", one.shape)
        return (parameter.is_linear or parameter.is_table) and one.keeps_rows(tensors)

    return frozenset(
        name
        for name, one in placed.items()
        if is_kept(name, one) and any(each.type in BLOCK_BYTES for each in one.tensors(tensors))
    )


def _is_linear(name: str, placed: Placed) -> bool:
    return StoredParameter(name, "", placed.shape).is_linear


def _folder(first: Path) -> Path:
    """Return the folder for a file, or for all parts of a split one.

    Raises `ConfigError` for a missing file.
    """
    digest = hashlib.sha256(f"{_FORMAT} {transformers.__version__} ".encode())
    parts = parts_of(first)
    if not all(file.is_file() for file in parts):
        read_header(first)  # its error says which file is missing
        parts = (first,)  # it is whole, whatever its name says
    for file in parts:
        facts = file.stat()
        digest.update(f"{file} {facts.st_size} {facts.st_mtime_ns} ".encode())
    return cache_dir() / "gguf" / f"{first.stem}-{digest.hexdigest()[:16]}"


def _header(tensors: Tensors, placed: Mapping[str, Placed]) -> Header:
    """Return a header in the form of safetensors, with the dtype that each tensor may keep."""
    in_int8, in_blocks = int8_weights(tensors, placed), weights_in_blocks(tensors, placed)

    def dtype(name: str, one: Placed) -> str:
        types = {each.type for each in one.tensors(tensors)}
        if name in in_blocks:
            return max(types & BLOCK_BYTES.keys())  # the one with more bits, by name
        if name in in_int8:
            return ROUNDED
        if _is_linear(name, one) and types <= set(_INT4_TYPES) and one.keeps_rows(tensors):
            return max(types)
        kept = {each if each in PLAIN else "BF16" for each in types}
        return kept.pop() if len(kept) == 1 else "F32"  # float32 has the values of any two

    return {name: {"dtype": dtype(name, one), "shape": one.shape} for name, one in placed.items()}


def _write(first: Path, field: str, folder: Path) -> None:
    from modelpool.gguf.tokenizer import tokenizer_of

    header = read_header(first)
    config = config_of(header) | {
        "dtype": _dtype(header.tensors.values()),
        "eos_token_id": _ends(header),
        "bos_token_id": header.facts.get("tokenizer.ggml.bos_token_id"),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    ends = {"eos_token_id": _ends(header)}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    check_served(folder, field)
    placed = {name: asdict(one) for name, one in placed_of(header, config).items()}
    tokenizer_of(header, _ends(header)).save_pretrained(folder)
    # As the model's class has it: Qwen's, for example, normalises texts.
    load_tokenizer(folder, field=field).save_pretrained(folder)
    tensors = [asdict(one) for one in header.tensors.values()]
    described = {"file": str(first), "tensors": tensors, "placed": placed}
    (folder / NAME).write_text(json.dumps(described, indent=1, default=str), encoding="utf-8")


def _dtype(tensors: Iterable[GgufTensor]) -> str:
    """Return the dtype for which most bytes of the file are intended."""
    sizes = dict[str, int]()
    for one in tensors:
        name = _DTYPES.get(one.type, "bfloat16")
        sizes[name] = sizes.get(name, 0) + one.size_bytes
    return max(sizes, key=lambda name: sizes[name])


def _ends(header: GgufHeader) -> list[int]:
    names = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ends = {header.fact(name, int) for name in names if name in header.facts}
    tokens = header.fact("tokenizer.ggml.tokens", list)
    known = {token: place for place, token in enumerate(tokens) if token in _TEXT_ENDS}
    ordinary = {known[names[-1]] for names in _NO_END if known.keys() >= set(names)}
    return sorted((ends | set(known.values())) - ordinary)
