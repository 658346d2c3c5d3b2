"""A target with the cost of a real one: a larger checkpoint of the same function.

Benchmarks then have the acceptance rates of a trained small model *and* the cost ratio of a real
pair. In exact arithmetic the logits are those of the source:

- The hidden state is padded with zeros, 4^k times as wide. RMSNorm then divides by a root mean
  square that is 2^k times smaller; its weights times 2^-k and its epsilon times 4^-k undo that,
  exactly in binary floating point.
- New attention heads have zero columns in the output projection, new MLP columns in the down
  projection; new layers have zero output and down projections.
- All other new weights are random, so that no kernel multiplies by easy zeros.

In floating point, sums of another length may round differently. Only the Llama architecture is
supported. The result is marked in its config: `specrouter_inflated`, `specrouter_inflated_from`.
Every figure that shows it must name it so.
"""

import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from modelpool.checkpoint.stored_tensors import StoredTensors
from modelpool.errors import ConfigError
from modelpool.inflate.llama_sizes import Growth, LlamaShape, realistic_growth, shape_of
from modelpool.inflate.tensors import InflatedTensors

# Files that are copied unchanged.
COPIED = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "generation_config.json")
# Errors of a damaged checkpoint, a full disk or too little memory, besides `ConfigError`.
FAULTS = (OSError, RuntimeError, ValueError, KeyError, SafetensorError)
_EPS = 1e-6  # default of LlamaConfig
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"  # files that are written
_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
)


def inflate(source: Path, out: Path, growth: Growth, *, dtype: str = "bfloat16") -> LlamaShape:
    """Write a wider and deeper copy of a Llama checkpoint, with its tokenizer.

    Args:
        source: folder of the checkpoint.
        out: folder to write.
        growth: change of the source's sizes.
        dtype: dtype of the written weights. One narrower than the source's rounds them.

    Raises:
        ConfigError: for a source that is no plain Llama; for `out` if that would overwrite a file
            of the source.
        Any of `FAULTS`: the source cannot be read, or `out` cannot be written.
    """
    config = _read_config(source)
    _check_out(source, out)
    old = shape_of(config)
    new, exponent = growth.of(old), growth.width_exponent
    weights, generator = dict(StoredTensors(source)), torch.Generator().manual_seed(0)
    if not weights:
        raise ConfigError("source", f"{str(source)!r} has no weights in *.safetensors files")
    inflated = InflatedTensors(weights, old, new, exponent, generator)
    out.mkdir(parents=True, exist_ok=True)
    stored = {
        name: tensor.to(getattr(torch, dtype)).contiguous() for name, tensor in inflated.tensors()
    }
    save_file(stored, str(out / _WEIGHTS), metadata={"format": "pt"})
    written = _inflated_config(config, new, exponent)
    marked = {**written, "dtype": dtype, "specrouter_inflated_from": source.name}
    (out / _CONFIG).write_text(json.dumps(marked, indent=2) + "\n")
    for file in _copied(source):
        shutil.copy(file, out)
    return new


def inflate_to(
    source: Path, out: Path, min_parameters: int, *, dtype: str = "bfloat16"
) -> LlamaShape:
    """Inflate to the proportions of a real model of at least `min_parameters`; see `inflate`."""
    growth = realistic_growth(shape_of(_read_config(source)), min_parameters)
    return inflate(source, out, growth, dtype=dtype)


def inflated_shape(source: Path, min_parameters: int) -> LlamaShape:
    """Return the shape that `inflate_to` would write; raise `ConfigError` if it cannot."""
    old = shape_of(_read_config(source))
    return realistic_growth(old, min_parameters).of(old)


def _read_config(source: Path) -> dict[str, Any]:
    file = source / _CONFIG
    if not file.is_file():
        raise ConfigError("source", f"{str(source)!r} has no {_CONFIG}: not a checkpoint")
    config: Any = json.loads(file.read_text())
    if not isinstance(config, dict):
        raise ConfigError("source", f"{str(file)!r} is not a configuration")
    if config.get("model_type") != "llama":
        raise ConfigError("source", f"only llama can be inflated, not {config.get('model_type')}")
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise ConfigError("source", "a llama with biases cannot be inflated")
    for name in _SIZES:
        if not isinstance(config.get(name), int) or config[name] < 1:
            raise ConfigError("source", f"{str(file)!r} has no {name}")
    shape = shape_of(config)
    if shape.hidden % shape.query_heads or shape.query_heads % shape.kv_heads:
        sizes = f"{shape.query_heads} and {shape.kv_heads} heads, of {shape.hidden} (hidden)"
        raise ConfigError("source", f"{str(file)!r} has {sizes}: they do not divide")
    return config


def _check_out(source: Path, out: Path) -> None:
    """Refuse to overwrite a file of the source, also through a link in `out`."""
    own = [file for file in source.iterdir() if file.is_file()]
    names = {_CONFIG, _WEIGHTS, *(file.name for file in _copied(source))}
    for file in (out / name for name in names):
        if file.exists() and any(file.samefile(other) for other in own):
            raise ConfigError("out", f"{str(file)!r} is the source's own and would be overwritten")


def _copied(source: Path) -> list[Path]:
    found = [file for pattern in COPIED for file in source.glob(pattern)]
    return [file for file in found if file.is_file()]


def _inflated_config(
    config: dict[str, Any], new: LlamaShape, width_exponent: int
) -> dict[str, Any]:
    changed = {
        "hidden_size": new.hidden,
        "num_hidden_layers": new.layers,
        "intermediate_size": new.mlp,
        "num_attention_heads": new.query_heads,
        "num_key_value_heads": new.kv_heads,
        "head_dim": new.head_dim,
        "rms_norm_eps": config.get("rms_norm_eps", _EPS) * 4.0**-width_exponent,
        "specrouter_inflated": True,
    }
    kept = {
        key: value for key, value in config.items() if key not in ("torch_dtype", "layer_types")
    }
    return {**kept, **changed}


def main() -> None:
    """Inflate in a separate process, with source, out, min_parameters and dtype as arguments.

    Its standard input ends when the process that waits for it does.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    source, out, min_parameters, dtype = sys.argv[1:]
    inflate_to(Path(source), Path(out), int(min_parameters), dtype=dtype)


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):  # not by a buffer, whose lock would be held at the end
        pass
    os._exit(1)  # the waiting process has ended, and the files are not needed
