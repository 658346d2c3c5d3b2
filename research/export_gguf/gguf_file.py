"""A Llama checkpoint as a GGUF file, which llama.cpp and what is built on it read.

Matrices are written in bfloat16, q8_0 or q4_0 (blocks of 32 values along a row, each with a scale
in float16), norms in float32. With q4_0 embeddings and head are q8_0, as `weights: int4` has them
in int8. A matrix whose rows are no whole number of blocks stays bfloat16.

Contract: one tensor is in memory at a time. The file appears whole or not at all. What is not a
Llama, or has what llama.cpp would compute otherwise, is refused with `ConfigError`.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelpool.checkpoint.stored_tensors import StoredTensors
from modelpool.errors import ConfigError
from modelpool.gguf.rotation import frequency_factors
from modelpool.inflate.llama_sizes import LlamaShape, shape_of
from research.export_gguf.gguf_tokenizer import GgufTokenizer, read_tokenizer
from research.export_gguf.llama_tensors import (
    FIELD,
    Source,
    check_names,
    rope,
    sources,
)

Type = Literal["bf16", "q8_0", "q4_0"]
_ROPE_TYPES = ("default", "linear", "llama3")
_BLOCK = 32  # values of a quantised block
_TOKENS = ("token_embd.weight", "output.weight")
_FREQUENCIES = "rope_freqs.weight"


@dataclass(frozen=True)
class Exported:
    """`pre`: llama.cpp's name of how text is split."""

    path: Path
    size_bytes: int
    tensors: int
    pre: str


def export_gguf(
    source: Path, out: Path, written: Type = "bf16", pre: str | None = None
) -> Exported:
    """Writes `out`.

    Args:
        pre: see `read_tokenizer`.

    Raises:
        ConfigError: naming what is refused; without the package `gguf`.
        OSError, SafetensorError: the source cannot be read, or `out` not be written.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(FIELD, "needs the package gguf: pip install specrouter[gguf]")
    config = _config(source)
    shape, parameters = shape_of(config), rope(config)
    tokenizer = read_tokenizer(source, shape.vocab_size, pre)
    part = out.with_name(f".{out.name}.part")
    try:
        weights, wanted = StoredTensors(source), sources(shape)
        if not weights:
            raise ConfigError(FIELD, f"{str(source)!r} has no weights in *.safetensors files")
        check_names(wanted, weights)
        tensors = _Tensors(weights, wanted, frequency_factors(parameters, shape.head_dim))
        _write(part, config, tokenizer, tensors, written)
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    return Exported(out, out.stat().st_size, len(tensors.names), tokenizer.pre)


@dataclass(frozen=True)
class _Tensors:
    """What is written, by llama.cpp's names."""

    weights: StoredTensors
    wanted: Mapping[str, Source]
    frequencies: Tensor | None

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.wanted, *[_FREQUENCIES] * (self.frequencies is not None))

    def shape(self, name: str) -> list[int]:
        if name == _FREQUENCIES:
            assert self.frequencies is not None
            return list(self.frequencies.shape)
        return self.weights.shape(self.wanted[name].name)

    def read(self, name: str) -> Tensor:
        if name == _FREQUENCIES:
            assert self.frequencies is not None
            return self.frequencies
        source = self.wanted[name]
        return source.laid_out(self.weights[source.name])


def _config(source: Path) -> dict[str, Any]:
    file = source / "config.json"
    if not file.is_file():
        raise ConfigError(FIELD, f"{str(source)!r} has no config.json: not a checkpoint")
    config: Any = json.loads(file.read_text(encoding="utf-8"))
    for name, reason in _refusals(config):
        raise ConfigError(FIELD, f"{str(file)!r}: {name} {reason}")
    return dict(config)


def _refusals(config: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(config, dict):
        yield "the file", "is no configuration"
        return
    architecture = (config.get("architectures") or [config.get("model_type")])[0]
    if config.get("model_type") != "llama" or architecture not in ("llama", "LlamaForCausalLM"):
        yield "architectures", f"is {architecture}; only LlamaForCausalLM can be written"
    for name in ("attention_bias", "mlp_bias", "quantization_config"):
        if config.get(name):
            yield name, "is set; only plain weights without biases can be written"
    if config.get("hidden_act", "silu") != "silu":
        yield "hidden_act", f"is {config['hidden_act']}; llama.cpp's llama has silu"
    kind = rope(config).get("rope_type", "default")
    if kind not in _ROPE_TYPES:
        yield "rope_type", f"is {kind}, not one of {', '.join(_ROPE_TYPES)}"
    for name in ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
                 "vocab_size", "max_position_embeddings"):  # fmt: skip
        if not isinstance(config.get(name), int):
            yield name, "is missing"


def _write(
    file: Path,
    config: Mapping[str, Any],
    tokenizer: GgufTokenizer,
    tensors: _Tensors,
    written: Type,
) -> None:
    import gguf  # optional, and slow to import

    writer = gguf.GGUFWriter(file, "llama")
    try:
        _add_facts(writer, config, written)
        _add_tokenizer(writer, config, tokenizer)
        plan = {name: _type_of(name, tensors.shape(name), written) for name in tensors.names}
        for name, kind in plan.items():
            dims, stored = tensors.shape(name), gguf.GGMLQuantizationType[kind.upper()]
            block, size = gguf.GGML_QUANT_SIZES[stored]
            count = int(np.prod(dims)) // block * size
            writer.add_tensor_info(name, dims, np.dtype(np.float32), count, raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, kind in plan.items():
            writer.write_tensor_data(_stored(tensors.read(name), kind))
    finally:
        writer.close()


def _type_of(name: str, dims: list[int], written: Type) -> str:
    if len(dims) == 1:
        return "f32"
    if dims[-1] % _BLOCK:
        return "bf16"
    return "q8_0" if written == "q4_0" and name in _TOKENS else written


def _stored(tensor: Tensor, kind: str) -> NDArray[Any]:
    """The tensor's bytes in the file."""
    import gguf

    if kind == "bf16":
        bits: NDArray[Any] = tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy()
        return bits
    values: NDArray[Any] = tensor.float().contiguous().numpy()
    if kind == "f32":
        return values
    blocks: NDArray[Any] = gguf.quantize(values, gguf.GGMLQuantizationType[kind.upper()])
    return blocks


def _add_facts(writer: Any, config: Mapping[str, Any], written: Type) -> None:
    import gguf

    shape, parameters = shape_of(dict(config)), rope(config)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{written.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if config.get("specrouter_inflated"):
        writer.add_description("inflated: a small model's function at a large one's cost")
    writer.add_vocab_size(shape.vocab_size)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.mlp)
    _add_attention(writer, shape, float(config.get("rms_norm_eps", 1e-6)))
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(float(parameters.get("rope_theta", 10_000.0)))
    if parameters.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(parameters["factor"]))


def _add_attention(writer: Any, shape: LlamaShape, epsilon: float) -> None:
    writer.add_head_count(shape.query_heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(epsilon)


def _add_tokenizer(writer: Any, config: Mapping[str, Any], tokenizer: GgufTokenizer) -> None:
    writer.add_tokenizer_model("gpt2")  # byte-level BPE
    writer.add_tokenizer_pre(tokenizer.pre)
    writer.add_token_list(tokenizer.tokens)
    writer.add_token_types(tokenizer.types)
    writer.add_token_merges(tokenizer.merges)
    writer.add_add_bos_token(tokenizer.adds_bos)
    for name, add in (
        ("bos_token_id", writer.add_bos_token_id),
        ("eos_token_id", writer.add_eos_token_id),
        ("pad_token_id", writer.add_pad_token_id),
    ):
        found = config.get(name)
        first = found[0] if isinstance(found, list) and found else found
        if isinstance(first, int) and first >= 0:  # -1: none
            add(first)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)
