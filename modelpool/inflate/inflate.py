"""A target that costs what a real one costs: a larger checkpoint of the same function.

Benchmarks then have the acceptance rates of a trained small model *and* the cost ratio of a real
pair. In exact arithmetic the logits are those of the source:

- The hidden state is padded with zeros, 4^k times as wide. RMSNorm then divides by a root mean
  square that is 2^k times smaller; its weights times 2^-k and its epsilon times 4^-k undo that,
  exactly in binary floating point.
- New attention heads have zero columns in the output projection, new MLP columns in the down
  projection; new layers have zero output and down projections.
- Whatever else is new is random, so that no kernel multiplies by easy zeros.

In floating point, sums of another length may round differently. Only the Llama architecture.
The result is marked in its config: `specrouter_inflated`, `specrouter_inflated_from`. Name it so
wherever a figure shows it.
"""

import json
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from modelpool.errors import ConfigError

_NOISE = 0.02  # spread of new weights, as in the initialisation of real models
_REAL_HIDDEN = 640  # the narrowest hidden state that passes for a real model's
# What comes along unchanged.
COPIED = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "generation_config.json")
# What a damaged checkpoint, a full disk or too little memory raise here, beside `ConfigError`.
FAULTS = (OSError, RuntimeError, ValueError, KeyError, SafetensorError)
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"  # that are written
_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
)


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama checkpoint that inflation changes, and those that it keeps."""

    hidden: int
    layers: int
    mlp: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool

    @property
    def parameter_count(self) -> int:
        attention = 2 * self.hidden * (self.query_heads + self.kv_heads) * self.head_dim
        layer = attention + 3 * self.hidden * self.mlp + 2 * self.hidden
        embeddings = (1 if self.tied else 2) * self.vocab_size * self.hidden
        return embeddings + self.layers * layer + self.hidden


def inflate(
    source: Path | str,
    out: Path | str,
    *,
    width_exponent: int,
    layers: int,
    mlp: int,
    query_heads_factor: int = 1,
    kv_heads_factor: int = 1,
    dtype: str = "bfloat16",
    seed: int = 0,
) -> LlamaShape:
    """Writes a wider and deeper copy of a Llama checkpoint, with its tokenizer.

    Args:
        width_exponent: k; the hidden state becomes 4^k times as wide.
        layers, mlp: their new number, at least the source's.
        query_heads_factor, kv_heads_factor: how many times as many heads; query heads grow at
            least as much as KV heads, and divide the new hidden size.
        dtype: of the written weights. One narrower than the source's rounds them.

    Raises:
        ConfigError: naming the argument that the source does not allow; for `out` where that would
            overwrite a file of the source's.
        Any of `FAULTS`: the source cannot be read, or `out` not be written.
    """
    source, out = Path(source), Path(out)
    config = _read_config(source)
    _check_out(source, out)
    old = _shape(config)
    new = LlamaShape(
        hidden=old.hidden * 4**width_exponent,
        layers=layers,
        mlp=mlp,
        query_heads=old.query_heads * query_heads_factor,
        kv_heads=old.kv_heads * kv_heads_factor,
        head_dim=old.head_dim,
        vocab_size=old.vocab_size,
        tied=old.tied,
    )
    _check(old, new, width_exponent)
    inflation = _Inflation(
        _read_tensors(source), old, new, width_exponent, torch.Generator().manual_seed(seed)
    )
    out.mkdir(parents=True, exist_ok=True)
    stored = {
        name: tensor.to(getattr(torch, dtype)).contiguous() for name, tensor in inflation.tensors()
    }
    save_file(stored, str(out / _WEIGHTS), metadata={"format": "pt"})
    _write_config(config, new, width_exponent, dtype, source.name, out)
    for file in _copied(source):
        shutil.copy(file, out)
    return new


def inflate_to(
    source: Path | str,
    out: Path | str,
    min_parameters: int = 200_000_000,
    *,
    dtype: str = "bfloat16",
    seed: int = 0,
) -> LlamaShape:
    """`inflate` to the proportions of a real model, of at least `min_parameters`."""
    old = _shape(_read_config(Path(source)))
    new, width_exponent = realistic_shape(old, min_parameters)
    return inflate(
        source,
        out,
        width_exponent=width_exponent,
        layers=new.layers,
        mlp=new.mlp,
        query_heads_factor=new.query_heads // old.query_heads,
        kv_heads_factor=new.kv_heads // old.kv_heads,
        dtype=dtype,
        seed=seed,
    )


def inflated_shape(source: Path | str, min_parameters: int) -> LlamaShape:
    """What `inflate_to` would write. Raises `ConfigError` where it cannot."""
    old = _shape(_read_config(Path(source)))
    new, width_exponent = realistic_shape(old, min_parameters)
    _check(old, new, width_exponent)
    return new


def realistic_shape(old: LlamaShape, min_parameters: int) -> tuple[LlamaShape, int]:
    """A shape of at least `min_parameters` that `old` inflates to, and its width exponent.

    As wide as the narrowest real models, heads in proportion, an MLP four times as wide as the
    hidden state, and as many layers as it takes.
    """
    width_exponent = 0
    while old.hidden * 4**width_exponent < _REAL_HIDDEN:
        width_exponent += 1
    factor = 4**width_exponent
    hidden = old.hidden * factor

    def shape(layers: int) -> LlamaShape:
        return LlamaShape(
            hidden=hidden,
            layers=layers,
            mlp=max(4 * hidden, old.mlp),
            query_heads=old.query_heads * factor,
            kv_heads=old.kv_heads * factor,
            head_dim=old.head_dim,
            vocab_size=old.vocab_size,
            tied=old.tied,
        )

    fixed = shape(0).parameter_count
    per_layer = shape(1).parameter_count - fixed
    layers = max(old.layers, math.ceil((min_parameters - fixed) / per_layer))
    return shape(layers), width_exponent


class _Inflation:
    """The tensors of the larger model, one after the other."""

    def __init__(
        self,
        weights: dict[str, Tensor],
        old: LlamaShape,
        new: LlamaShape,
        width_exponent: int,
        generator: torch.Generator,
    ) -> None:
        self._weights, self._old, self._new = weights, old, new
        self._norm_scale = 2.0**-width_exponent
        self._generator = generator

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "model.embed_tokens.weight", self._padded(self._weights["model.embed_tokens.weight"])
        for layer in range(self._new.layers):
            yield from self._layer(f"model.layers.{layer}.", is_new=layer >= self._old.layers)
        yield "model.norm.weight", self._norm("model.norm.weight")
        if not self._new.tied:
            yield "lm_head.weight", self._widened(self._weights["lm_head.weight"])

    def _layer(self, prefix: str, is_new: bool) -> Iterator[tuple[str, Tensor]]:
        new, dim = self._new, self._new.head_dim
        query_rows = None if is_new else self._query_rows()
        kv_rows = None if is_new else torch.arange(self._old.kv_heads * dim)
        mlp_rows = None if is_new else torch.arange(self._old.mlp)
        for name, rows, count in (
            ("self_attn.q_proj", query_rows, new.query_heads * dim),
            ("self_attn.k_proj", kv_rows, new.kv_heads * dim),
            ("self_attn.v_proj", kv_rows, new.kv_heads * dim),
            ("mlp.gate_proj", mlp_rows, new.mlp),
            ("mlp.up_proj", mlp_rows, new.mlp),
        ):
            yield f"{prefix}{name}.weight", self._into(f"{prefix}{name}.weight", rows, count)
        for name, columns, count in (
            ("self_attn.o_proj", query_rows, new.query_heads * dim),
            ("mlp.down_proj", mlp_rows, new.mlp),
        ):
            yield f"{prefix}{name}.weight", self._back(f"{prefix}{name}.weight", columns, count)
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            yield prefix + name, self._norm(prefix + name)

    def _query_rows(self) -> Tensor:
        """Where the source's query heads go: each to the KV head that it had. [old rows]"""
        old, new = self._old, self._new
        head = torch.arange(old.query_heads)
        group, place = (
            head // (old.query_heads // old.kv_heads),
            head % (old.query_heads // old.kv_heads),
        )
        head = group * (new.query_heads // new.kv_heads) + place
        return (head[:, None] * old.head_dim + torch.arange(old.head_dim)).flatten()

    def _into(self, name: str, rows: Tensor | None, count: int) -> Tensor:
        """[count, hidden] a projection out of the hidden state; new rows and columns random."""
        weight = self._random(count, self._new.hidden)
        if rows is not None:
            weight[rows, : self._old.hidden] = self._weights[name].to(weight.dtype)
        return weight

    def _back(self, name: str, columns: Tensor | None, count: int) -> Tensor:
        """[hidden, count] a projection into the hidden state; all that is new is zero."""
        weight = torch.zeros(self._new.hidden, count, dtype=self._dtype)
        if columns is not None:
            weight[: self._old.hidden, columns] = self._weights[name]
        return weight

    def _norm(self, name: str) -> Tensor:
        """[hidden] what belongs to the padding scales zeros: it may be anything."""
        weight = torch.ones(self._new.hidden, dtype=self._dtype)
        if name in self._weights:
            weight[: self._old.hidden] = self._weights[name]
        return weight * self._norm_scale

    def _padded(self, weight: Tensor) -> Tensor:
        """[V, hidden] the embedding: its padding must be zero."""
        padded = torch.zeros(weight.shape[0], self._new.hidden, dtype=self._dtype)
        padded[:, : self._old.hidden] = weight
        return padded

    def _widened(self, weight: Tensor) -> Tensor:
        """[V, hidden] an untied output embedding: it reads zeros there, so anything will do."""
        widened = self._random(weight.shape[0], self._new.hidden)
        widened[:, : self._old.hidden] = weight
        return widened

    def _random(self, *shape: int) -> Tensor:
        return (torch.randn(shape, generator=self._generator) * _NOISE).to(self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        return self._weights["model.embed_tokens.weight"].dtype


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
    return config


def _check_out(source: Path, out: Path) -> None:
    """A link in `out` to the source's weights would be written through, too."""
    own = [file for file in source.iterdir() if file.is_file()]
    names = {_CONFIG, _WEIGHTS, *(file.name for file in _copied(source))}
    for file in (out / name for name in names):
        if file.exists() and any(file.samefile(other) for other in own):
            raise ConfigError("out", f"{str(file)!r} is the source's own and would be overwritten")


def _copied(source: Path) -> list[Path]:
    found = [file for pattern in COPIED for file in source.glob(pattern)]
    return [file for file in found if file.is_file()]


def _shape(config: dict[str, Any]) -> LlamaShape:
    heads = config["num_attention_heads"]
    return LlamaShape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        mlp=config["intermediate_size"],
        query_heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def _check(old: LlamaShape, new: LlamaShape, width_exponent: int) -> None:
    if width_exponent < 0:
        raise ConfigError("width_exponent", f"must be 0 or more, got {width_exponent}")
    for field in ("layers", "mlp"):
        if getattr(new, field) < getattr(old, field):
            reason = f"{getattr(new, field)} is less than the source's {getattr(old, field)}"
            raise ConfigError(field, reason)
    if new.kv_heads < old.kv_heads:
        raise ConfigError("kv_heads_factor", "must be 1 or more")
    if new.query_heads * old.kv_heads < old.query_heads * new.kv_heads:
        raise ConfigError("query_heads_factor", "must be at least kv_heads_factor")
    if new.hidden % new.query_heads:  # transformers refuses such a configuration
        raise ConfigError(
            "query_heads_factor", f"{new.query_heads} heads do not divide {new.hidden} (hidden)"
        )
    if new.query_heads % new.kv_heads:
        raise ConfigError(
            "query_heads_factor", f"{new.query_heads} heads do not share {new.kv_heads} KV heads"
        )


def _read_tensors(source: Path) -> dict[str, Tensor]:
    weights = {}
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  not a mapping
                weights[name] = tensors.get_tensor(name)
    if not weights:
        raise ConfigError("source", f"{str(source)!r} has no weights in *.safetensors files")
    return weights


def _write_config(
    config: dict[str, Any],
    new: LlamaShape,
    width_exponent: int,
    dtype: str,
    source_name: str,
    out: Path,
) -> None:
    changed = {
        "hidden_size": new.hidden,
        "num_hidden_layers": new.layers,
        "intermediate_size": new.mlp,
        "num_attention_heads": new.query_heads,
        "num_key_value_heads": new.kv_heads,
        "head_dim": new.head_dim,
        "rms_norm_eps": config["rms_norm_eps"] * 4.0**-width_exponent,
        "dtype": dtype,
        "specrouter_inflated": True,
        "specrouter_inflated_from": source_name,
    }
    kept = {
        key: value for key, value in config.items() if key not in ("torch_dtype", "layer_types")
    }
    (out / _CONFIG).write_text(json.dumps({**kept, **changed}, indent=2) + "\n")


def main() -> None:
    """A process of its own: source, out, min_parameters and dtype as arguments."""
    source, out, min_parameters, dtype = sys.argv[1:]
    inflate_to(source, out, int(min_parameters), dtype=dtype)
