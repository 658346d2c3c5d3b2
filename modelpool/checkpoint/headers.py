"""Parameters of a checkpoint, from the headers of safetensors files, and their future memory.

All functions are pure except those that read headers, which takes milliseconds.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelpool.checkpoint.dtypes import NAMED_DTYPES
from modelpool.checkpoint.quantization import Stored
from modelpool.errors import ConfigError

# Constants that old checkpoints store beside their weights (causal masks, rotary tables).
NOT_PARAMETERS = (
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    ".inv_freq",
)
# Tensors beside quantised weights that are no parameters.
_SCALES: Mapping[Stored, tuple[str, ...]] = {
    "int8": (".weight_scale", ".weight_zero_point"),
    "mxfp4": ("_scales",),
}
_BLOCKS = "_blocks"  # [experts, out, in / 32, 16 bytes] in MXFP4
_HEAD = "lm_head.weight"  # stored by some checkpoints although it is tied to the embedding
_HEADS = (_HEAD, "embed_out.weight")
_EXPERT = ".experts."
_LATENT = ".kv_b_proj.weight"
_STACKED = ("up_proj", "down_proj")  # ends of the names of tensors that hold all experts
_LAYER = re.compile(r"\.\d+\.")  # model.layers.0.mlp.up_proj.weight
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LFS_POINTER = b"version https://git-lfs"  # start of the text that stands for a missing file
_MOST_HEADER, _MOST_BYTES = 100_000_000, 2**63  # limit of safetensors; of any file
_SCALE_BYTES = 4  # scale of a channel of int8 weights
_INT4_GROUP = 32  # inputs
# Bits of a weight that is kept in blocks, by its type in GGUF files; then of grouped weights.
_SMALL_BITS = {"Q4_0": 4.5, "Q4_1": 5.0, "Q4_K": 4.625}
_WIDE_BITS = {
    "Q5_0": 5.5, "Q5_1": 6.0, "Q8_0": 8.5, "Q5_K": 5.625, "Q6_K": 6.5625, "IQ4_NL": 8.5,
    "IQ4_XS": 8.3125, "MXFP4": 8.5,
}  # fmt: skip
_BLOCK_BITS = _SMALL_BITS | _WIDE_BITS
_ROUNDED_SMALL = ("Q2_K", "Q3_K")  # are kept in 4 bits, but not in blocks
_GROUPED, _GROUP_BITS = "GROUP", 4.25
ROUNDED = "Q8_0"  # the form of weights that are rounded to 8 bits

Header = Mapping[str, Mapping[str, Any]]  # dtype and shape of each tensor in a file of weights


@dataclass(frozen=True)
class StoredParameter:
    """A parameter of a checkpoint.

    `dtype` is its name in safetensors; of a weight in blocks its name in a GGUF file, or `grouped`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def stored_bytes(self) -> int:
        dtype = NAMED_DTYPES.get(self.dtype)  # others take a byte or less
        return self.count * (1 if dtype is None else dtype.itemsize)

    @property
    def in_layer(self) -> bool:
        return _LAYER.search(self.name) is not None

    @property
    def is_head(self) -> bool:
        return self.name.endswith(_HEADS)

    @property
    def is_table(self) -> bool:
        """True for an embedding, from which a forward looks up rows."""
        return len(self.shape) == 2 and not self.in_layer and not self.is_head

    @property
    def is_expert(self) -> bool:
        return _EXPERT in self.name

    @property
    def is_linear(self) -> bool:
        """True for the weight of a linear layer, of an expert or of all experts."""
        if self.is_expert and len(self.shape) == 3:
            return self.name.endswith(_STACKED)
        is_matrix = len(self.shape) == 2 and self.name.endswith(".weight")
        return is_matrix and (self.in_layer or self.is_head)

    @property
    def stays_plain(self) -> bool:
        """True for a weight that stays plain: it is applied to no token (`attention.latent`)."""
        return self.name.endswith(_LATENT)

    @property
    def _outputs(self) -> int:
        """Number of rows of a matrix, or of all experts' matrices.

        Some experts have columns here instead, and nearly as many.
        """
        return math.prod(self.shape[:-1])

    @property
    def int8_bytes(self) -> int:
        """Bytes in int8, with scales."""
        return self.count + _SCALE_BYTES * self._outputs

    @property
    def is_in_blocks(self) -> bool:
        return self.is_in_small_blocks or self.dtype in _WIDE_BITS

    @property
    def is_in_small_blocks(self) -> bool:
        """True if its blocks have 4 bits."""
        return self.dtype in _SMALL_BITS or self.dtype.startswith(_GROUPED)

    @property
    def is_small(self) -> bool:
        """True if the checkpoint has it in 4 bits or fewer."""
        return self.is_in_small_blocks or self.dtype in _ROUNDED_SMALL

    @property
    def block_bytes(self) -> int:
        """Bytes in its own blocks, with a number for each output."""
        bits = _BLOCK_BITS.get(self.dtype)
        if bits is None:
            bits = _GROUP_BITS + 32 / int(self.dtype.removeprefix(_GROUPED))
        return round(self.count * bits / 8) + _SCALE_BYTES * self._outputs

    @property
    def rounded_bytes(self) -> int:
        """Bytes in blocks of 8 bits."""
        return round(self.count * _BLOCK_BITS[ROUNDED] / 8) + _SCALE_BYTES * self._outputs

    @property
    def int4_bytes(self) -> int:
        """Bytes in int4, with a scale and a centre for each group, and a number for each output."""
        return self.count // 2 + 2 * self.count // _INT4_GROUP + _SCALE_BYTES * self._outputs


def grouped(inputs: int) -> str:
    """Return the dtype of 4-bit numbers with a scale and a zero for so many inputs."""
    return f"{_GROUPED}{inputs}"


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of weights once they are loaded.

    Attributes:
        outer: bytes of the weights that are in no layer.
        read: bytes of the weights that a token's forward reads, without embeddings, which are
            looked up; None if that depends on the token (experts).
        tied_elements: elements of an embedding that is also the head and is not quantised.
    """

    total: int
    outer: int
    read: int | None
    tied_elements: int = 0


def parameters_of(
    headers: Iterable[Header], *, is_tied: bool, stored: Stored = "plain"
) -> list[StoredParameter]:
    """Return the parameters of a checkpoint.

    Args:
        headers: headers of the weight files.
        is_tied: the head is the embedding.
        stored: experts in "mxfp4" get the names and shapes that they have when unpacked.
    """
    skipped = NOT_PARAMETERS + ((_HEAD,) if is_tied else ()) + _SCALES.get(stored, ())
    found = [
        StoredParameter(name, entry["dtype"], tuple(entry["shape"]))
        for header in headers
        for name, entry in header.items()
        if not name.endswith(skipped)
    ]
    return [_dequantised(one) for one in found] if stored == "mxfp4" else found


def _dequantised(one: StoredParameter) -> StoredParameter:
    if not one.name.endswith(_BLOCKS):
        return one
    experts, outputs, groups, size = one.shape
    shape = (experts, groups * size * 2, outputs)
    return StoredParameter(one.name.removesuffix(_BLOCKS), "MXFP4", shape)


def weight_bytes(
    parameters: Sequence[StoredParameter],
    width: float,
    quantised_bytes: Callable[[StoredParameter], int | None] = lambda _: None,
    tied_rows: int | None = None,
) -> WeightBytes:
    """Return the bytes of weights once they are loaded.

    Args:
        parameters: parameters of a checkpoint.
        width: bytes of an element that is not quantised.
        quantised_bytes: returns the bytes of a quantised weight, or None for another one.
        tied_rows: rows of the embedding, if the head is the same weight. A quantised head is a copy
            of a plain embedding; a packed one is also a copy, but is not counted here.
    """

    def taken(one: StoredParameter) -> float:
        small = quantised_bytes(one)
        return one.count * width if small is None else small

    outer = sum(taken(one) for one in parameters if not one.in_layer)
    inner = sum(taken(one) for one in parameters if one.in_layer)
    read = inner + sum(taken(one) for one in parameters if one.is_head)
    tied_elements = 0
    tables = [one for one in parameters if one.is_table and one.shape[0] == tied_rows]
    for head in (replace(table, name=_HEAD) for table in tables[:1]):
        small = quantised_bytes(head)
        outer += (small or 0) if quantised_bytes(tables[0]) is None else 0
        tied_elements = head.count if small is None else 0
        read += taken(head)
    known_read = None if any(one.is_expert for one in parameters) else round(read)
    return WeightBytes(round(inner + outer), round(outer), known_read, tied_elements)


def header_of(file: Path) -> Header:
    """Return the dtype and shape of each tensor in a safetensors file.

    Raises `ConfigError` for a file that is not whole. Its length shows this: it is 8 bytes, the
    header, and the data up to the last tensor's end.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(len(_LFS_POINTER))
        if start == _LFS_POINTER:
            reason = "is a Git LFS pointer, not weights: run `git lfs pull`, or use hub:ORG/NAME"
            raise ConfigError("", f"{str(file)!r} {reason}")
        data = 8 + int.from_bytes(start[:8], "little")  # offset of the data
        stream.seek(8)
        found = _parsed(stream.read(data - 8)) if data <= min(size, _MOST_HEADER) else None
    if found is None:
        reason = "is incomplete, or no safetensors file: download it again"
        raise ConfigError("", f"{str(file)!r} {reason}")
    header, whole = found[0], data + found[1]
    if size != whole:
        state = "is incomplete" if size < whole else "is longer than its header says"
        sizes = f"({size / 1e6:.1f} of {whole / 1e6:.1f} MB)"
        raise ConfigError("", f"{str(file)!r} {state} {sizes}: download it again")
    return header


def _parsed(text: bytes) -> tuple[Header, int] | None:
    """Return a file's header and the end of its last tensor, or None for an invalid header."""
    try:
        header: dict[str, Any] = json.loads(text)
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return (header, end) if isinstance(end, int) and end < _MOST_BYTES else None


def headers_of(directory: Path) -> list[Header]:
    """Return the headers of a checkpoint's weight files.

    Raises `ConfigError` for a file that is not whole, or an index that does not fit them.
    """
    headers = {file.name: header_of(file) for file in weight_files(directory)}
    for tensor, file in (_weight_map(directory) or {}).items():
        if tensor not in headers[file]:
            raise ConfigError("", f"{_INDEX} says that {tensor} is in {file}, where it is not")
    return list(headers.values())


def has_weights(directory: Path) -> bool:
    """Return whether all of a checkpoint's weight files are there."""
    files = weight_files(directory)
    return bool(files) and all(file.is_file() for file in files)


def weight_files(directory: Path) -> list[Path]:
    """Return the files that transformers would load; other ones may lie beside them.

    Raises `ConfigError` for an invalid index.
    """
    where = _weight_map(directory)
    if where is not None:
        return [directory / name for name in sorted(set(where.values()))]
    single = directory / _SINGLE
    return [single] if single.is_file() else sorted(directory.glob("*.safetensors"))


def _weight_map(directory: Path) -> Mapping[str, str] | None:
    """Return the file of each tensor if the weights are in several files, else None.

    An index beside a single file is ignored.
    """
    index = directory / _INDEX
    if (directory / _SINGLE).is_file() or not index.is_file():
        return None
    try:
        stored: Any = json.loads(index.read_text(encoding="utf-8"))
    except ValueError:
        stored = None
    is_index = isinstance(stored, dict) and "metadata" in stored
    found: Any = stored.get("weight_map") if is_index else None
    names = found.values() if isinstance(found, dict) else [None]
    if not all(isinstance(name, str) and name == Path(name).name for name in names):
        reason = "is no index: it needs metadata, and a weight_map of tensors and names of files"
        raise ConfigError("", f"{str(index)!r} {reason}")
    return dict(found)
