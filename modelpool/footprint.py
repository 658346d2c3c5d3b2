"""What a checkpoint is and needs, read from its headers without loading it.

Parameters are counted from the safetensors headers, which costs a few milliseconds where
building the model, even on the meta device, costs seconds.
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from modelpool.architecture import max_positions
from modelpool.config import Dtype
from modelpool.errors import ConfigError, UnsupportedModelError

# Constants that old checkpoints store beside their weights (GPT-2's causal mask, rotary tables).
_NOT_PARAMETERS = (".attn.bias", ".attn.masked_bias", ".inv_freq")
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_STORED_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}


@dataclass(frozen=True)
class ModelFootprint:
    """What placing a model needs to know of it.

    `field` is its place in the configuration; `device` what that asks for ("auto", "cpu",
    "cuda", "cuda:1").
    """

    name: str
    weight_bytes: int
    kv_bytes_per_token: int = 0
    parameter_count: int = 0
    field: str = "pool"
    device: str = "auto"

    def total_bytes(self, kv_tokens: int) -> int:
        """Weights, and the KV of `kv_tokens` reserved tokens."""
        return self.weight_bytes + self.kv_bytes_per_token * kv_tokens


@dataclass(frozen=True)
class CheckpointFacts:
    """What a checkpoint's headers and configuration say."""

    parameter_count: int
    weight_bytes: int
    kv_bytes_per_token: int
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
        )


def read_checkpoint(
    directory: Path, *, field: str, dtype: Dtype = "auto", trust_remote_code: bool = False
) -> CheckpointFacts:
    """The facts of a checkpoint as loaded in `dtype`. Raises `ConfigError` for `{field}.source`."""
    try:
        return _read(directory, dtype, trust_remote_code)
    except (OSError, ValueError, KeyError, struct.error) as error:
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


def _read(directory: Path, dtype: Dtype, trust_remote_code: bool) -> CheckpointFacts:
    config = read_config(directory, trust_remote_code)
    tensors = _tensors(directory)
    text = config.get_text_config(decoder=True)
    count = sum(math.prod(shape) for shape, _ in tensors)
    stored_bytes = sum(math.prod(shape) * width for shape, width in tensors)
    width = _DTYPE_BYTES[dtype] if dtype != "auto" else stored_bytes / max(count, 1)
    return CheckpointFacts(
        parameter_count=count,
        weight_bytes=round(count * width),
        kv_bytes_per_token=round(_kv_elements_per_token(text) * width),
        max_positions=max_positions(text),
        vocab_rows=int(text.vocab_size),
        eos_token_ids=_eos_token_ids(directory, text),
    )


def _tensors(directory: Path) -> list[tuple[list[int], int]]:
    """Shape and bytes per element of each stored parameter."""
    found = []
    for file in _weight_files(directory):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name != "__metadata__" and not name.endswith(_NOT_PARAMETERS):
                found.append((entry["shape"], _STORED_BYTES.get(entry["dtype"], 1)))
    return found


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
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * int(config.num_hidden_layers) * int(kv_heads) * int(head_dim)


def _eos_token_ids(directory: Path, config: PreTrainedConfig) -> frozenset[int]:
    """The ids that end a text: the generation config's, as `generate` has it, else the config's."""
    file = directory / "generation_config.json"
    stored: Any = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    if stored is None:
        stored = getattr(config, "eos_token_id", None)
    if stored is None:
        return frozenset()
    return frozenset(stored if isinstance(stored, list) else [stored])
