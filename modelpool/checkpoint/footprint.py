"""What a checkpoint is and needs, read from its headers without loading it.

Parameters are counted from the safetensors headers, which costs a few milliseconds where
building the model, even on the meta device, costs seconds.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from modelpool.checkpoint.architecture import max_positions
from modelpool.config import Dtype
from modelpool.errors import ConfigError, UnsupportedModelError

# Constants that old checkpoints store beside their weights (causal masks, rotary tables).
_NOT_PARAMETERS = (
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    ".inv_freq",
)
_HEAD = "lm_head.weight"  # stored by some though it is tied to the embedding
_LAYER = re.compile(r"\.\d+\.")  # model.layers.0.mlp.up_proj.weight
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_LFS_POINTER = b"version https://git-lfs"  # how the text begins that stands for a file
_STORED_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}
_STORED_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

Header = Mapping[str, Mapping[str, Any]]  # of a file of weights: by tensor its dtype and shape


@dataclass(frozen=True)
class ModelFootprint:
    """What placing a model needs to know of it.

    `outer_bytes` are those of the weights that are in no layer: embeddings, the head. `field` is
    its place in the configuration; `device` what that asks for ("auto", "cpu", "cuda", "cuda:1").
    """

    name: str
    weight_bytes: int
    kv_bytes_per_token: int = 0
    parameter_count: int = 0
    field: str = "pool"
    device: str = "auto"
    outer_bytes: int = 0

    def total_bytes(self, kv_tokens: int) -> int:
        """Weights, and a KV store for `kv_tokens` tokens."""
        return self.weight_bytes + self.kv_bytes_per_token * kv_tokens

    def part_bytes(self, weight_bytes: int, kv_tokens: int) -> int:
        """The most that a part of the weights takes, the KV of its layers included."""
        layers, kv = self._layers_and_kv(kv_tokens)
        return -(-weight_bytes * (layers + kv) // layers)

    def part_within(self, room_bytes: int, kv_tokens: int) -> int:
        """The most bytes of weights that have room with the KV of their layers."""
        layers, kv = self._layers_and_kv(kv_tokens)
        return room_bytes * layers // (layers + kv)

    def _layers_and_kv(self, kv_tokens: int) -> tuple[int, int]:
        """Bytes of the layers, among which the KV is divided, and of the KV."""
        layers = max(self.weight_bytes - self.outer_bytes, 1)
        return layers, self.kv_bytes_per_token * kv_tokens


@dataclass(frozen=True)
class CheckpointFacts:
    """What a checkpoint's headers and configuration say, for the dtype that it is loaded in."""

    parameter_count: int
    dtype: str  # that it computes in
    is_quantized: bool
    weight_bytes: int
    outer_bytes: int  # of the weights, those in no layer
    kv_bytes_per_token: int
    head_dim: int
    max_positions: int
    vocab_rows: int  # rows of the embedding: the tokenizer's length, or more (padded)
    eos_token_ids: frozenset[int]

    def footprint(self, name: str, field: str, device: str) -> ModelFootprint:
        """These facts as a demand on a device."""
        return ModelFootprint(
            name=name,
            weight_bytes=self.weight_bytes,
            kv_bytes_per_token=self.kv_bytes_per_token,
            parameter_count=self.parameter_count,
            field=field,
            device=device,
            outer_bytes=self.outer_bytes,
        )


def read_checkpoint(
    directory: Path,
    *,
    field: str,
    dtype: Dtype = "auto",
    trust_remote_code: bool = False,
    headers: Iterable[Header] | None = None,
) -> CheckpointFacts:
    """The facts of a checkpoint as loaded in `dtype`. Raises `ConfigError` for `{field}.source`.

    `headers`: of weights that are not in the directory.
    """
    try:
        return _read(directory, dtype, trust_remote_code, headers)
    except ConfigError as error:
        raise ConfigError(f"{field}.source", error.reason) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"cannot read the checkpoint in {str(directory)!r}: {error}"
        raise ConfigError(f"{field}.source", reason) from error
    except AttributeError as error:  # a state-space model has no heads to count
        reason = f"not a decoder with softmax attention in every layer: {error}"
        raise UnsupportedModelError(f"{field}.source", reason) from error


def read_config(directory: Path, trust_remote_code: bool) -> PreTrainedConfig:
    """The configuration of a local checkpoint."""
    config: PreTrainedConfig = AutoConfig.from_pretrained(
        str(directory), trust_remote_code=trust_remote_code, local_files_only=True
    )
    return config


def has_weights(directory: Path) -> bool:
    """Are all files of its weights there?"""
    files = _weight_files(directory)
    return bool(files) and all(file.is_file() for file in files)


def _read(
    directory: Path, dtype: Dtype, trust_remote_code: bool, headers: Iterable[Header] | None
) -> CheckpointFacts:
    config = read_config(directory, trust_remote_code)
    text = config.get_text_config(decoder=True)
    stored = map(_header, _weight_files(directory)) if headers is None else headers
    tensors = _tensors(stored, is_tied=bool(getattr(config, "tie_word_embeddings", False)))
    count = sum(tensor.count for tensor in tensors)
    loaded = _own_dtype(config, text, tensors) if dtype == "auto" else dtype
    is_quantized = getattr(config, "quantization_config", None) is not None
    stored_bytes = sum(tensor.count * tensor.width for tensor in tensors)
    width = stored_bytes / max(count, 1) if is_quantized else _DTYPE_BYTES[loaded]
    return CheckpointFacts(
        parameter_count=count,
        dtype=loaded,
        is_quantized=is_quantized,
        weight_bytes=round(count * width),
        outer_bytes=round(sum(tensor.count for tensor in tensors if not tensor.in_layer) * width),
        kv_bytes_per_token=_kv_elements_per_token(text) * _DTYPE_BYTES[loaded],
        head_dim=_head_dim(text),
        max_positions=max_positions(text),
        vocab_rows=int(text.vocab_size),
        eos_token_ids=_eos_token_ids(directory, text),
    )


@dataclass(frozen=True)
class _Stored:
    """A stored parameter: its elements, and the bytes of each."""

    count: int
    dtype: str  # as safetensors names it
    in_layer: bool

    @property
    def width(self) -> int:
        return _STORED_BYTES.get(self.dtype, 1)


def _tensors(headers: Iterable[Header], is_tied: bool) -> list[_Stored]:
    """The parameters; `is_tied`: the head is the embedding."""
    skipped = (*_NOT_PARAMETERS, _HEAD) if is_tied else _NOT_PARAMETERS
    return [
        _Stored(
            math.prod(entry["shape"]),
            entry["dtype"],
            _LAYER.search(name) is not None,
        )
        for header in headers
        for name, entry in header.items()
        if not name.endswith(skipped)
    ]


def _own_dtype(config: PreTrainedConfig, text: PreTrainedConfig, tensors: Iterable[_Stored]) -> str:
    """What `auto` is to transformers: the configuration's dtype, else the weights'."""
    declared = getattr(config, "dtype", None) or getattr(text, "dtype", None)
    name = str(declared).removeprefix("torch.")
    if name in _DTYPE_BYTES:
        return name
    parameters: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype in _STORED_DTYPES:
            parameters[_STORED_DTYPES[tensor.dtype]] += tensor.count
    return parameters.most_common(1)[0][0] if parameters else "float32"


def _header(file: Path) -> Header:
    """What a safetensors file says of each tensor. Raises `ConfigError` for one that is not whole.

    Its length tells: it is 8 bytes, the header, and the data up to the last tensor's end.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(len(_LFS_POINTER))
        if start == _LFS_POINTER:
            reason = "is a Git LFS pointer, not weights: run `git lfs pull`, or use hub:ORG/NAME"
            raise ConfigError("", f"{str(file)!r} {reason}")
        data = 8 + int.from_bytes(start[:8], "little")  # where it begins
        if size < data:
            reason = "is incomplete, or no safetensors file: download it again"
            raise ConfigError("", f"{str(file)!r} {reason}")
        stream.seek(8)
        header: dict[str, Any] = json.loads(stream.read(data - 8))
    header.pop("__metadata__", None)
    whole = data + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != whole:
        state = "is incomplete" if size < whole else "is longer than its header says"
        sizes = f"({size / 1e6:.1f} of {whole / 1e6:.1f} MB)"
        raise ConfigError("", f"{str(file)!r} {state} {sizes}: download it again")
    return header


def _weight_files(directory: Path) -> list[Path]:
    """The files that transformers would load; others may lie beside them."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        files = set(json.loads(index.read_text())["weight_map"].values())
        return [directory / name for name in sorted(files)]
    single = directory / "model.safetensors"
    return [single] if single.is_file() else sorted(directory.glob("*.safetensors"))


def _kv_elements_per_token(config: PreTrainedConfig) -> int:
    heads = int(config.num_attention_heads)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return 2 * int(config.num_hidden_layers) * int(kv_heads) * _head_dim(config)


def _head_dim(config: PreTrainedConfig) -> int:
    own = getattr(config, "head_dim", None)
    return int(own or config.hidden_size // config.num_attention_heads)


def _eos_token_ids(directory: Path, config: PreTrainedConfig) -> frozenset[int]:
    """The ids that end a text: the generation config's, as `generate` has it, else the config's."""
    file = directory / "generation_config.json"
    stored: Any = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    if stored is None:
        stored = getattr(config, "eos_token_id", None)
    if stored is None:
        return frozenset()
    return frozenset(stored if isinstance(stored, list) else [stored])
