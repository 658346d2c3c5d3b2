"""GGUF files of small random models, and what a model with the file's own weights computes.

Contract: written by the package `gguf`, K types from blocks drawn here. The weights that the
reference has are those that `gguf` makes of the file's bytes, in the order of the checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GemmaConfig, MixtralConfig, Qwen3MoeConfig

from test_support.factories import SAVERS, edit_config, save_model

# Mixtral's files are of the family llama.
_ARCHITECTURES = {"mixtral": "llama"}
MIXTURES = {"mixtral": MixtralConfig, "qwen3moe": Qwen3MoeConfig}
FAMILIES = (*MIXTURES, "llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")
QUANTISED = ("Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "MXFP4")  # that `gguf.quantize` writes
# Others, and where their blocks have scales in float16.
SCALED = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip

Kinds = Callable[[str], str]  # the type of a matrix, by its name


def save(family: str, folder: Path, **settings: Any) -> Path:
    """A checkpoint whose layers are as its family's are in GGUF files."""
    layers = {"gemma3": 6}.get(family, 2)
    saver = SAVERS.get(family, partial(save_model, MIXTURES.get(family, GemmaConfig), tied=True))
    saver(folder, **{"layers": layers, "dtype": "float32", **settings})
    if family == "gemma3":
        edit_config(folder, layer_types=["sliding_attention"] * 5 + ["full_attention"])
    return folder


def write(
    family: str,
    checkpoint: Path,
    file: Path,
    kind: str | Kinds = "F32",
    facts: Mapping[str, Any] | None = None,
    more: Mapping[str, torch.Tensor] | None = None,
    split: int = 0,
    pre: str | None = "gpt-2",
) -> Path:
    """`facts`, `more`: further ones, and tensors. `split`: tensors of each part. `pre`: None
    for a sentencepiece vocabulary."""
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = _ARCHITECTURES.get(family, family)
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=split)
    _put_facts(writer, family, config)
    if pre is None:
        _put_sentencepiece(writer, config["vocab_size"])
    else:
        put_tokenizer(writer, checkpoint, config["vocab_size"], pre)
    for name, value in (facts or {}).items():
        put_fact(writer, name, value)
    for name, (tensor, _) in laid_out(family, checkpoint).items():
        if len(tensor.shape) == 1:
            writer.add_tensor(name, tensor)
            continue
        type_ = kind if isinstance(kind, str) else kind(name)
        stored = gguf.GGMLQuantizationType[type_]
        if isinstance(kind, str) and "ffn_gate_inp" in name:  # as files have it
            stored, type_ = gguf.GGMLQuantizationType.F32, "F32"
        flat = tensor.reshape(-1, tensor.shape[-1])
        blocks = drawn_blocks(type_, flat) if type_ in SCALED else gguf.quantize(flat, stored)
        blocks = blocks.reshape(*tensor.shape[:-1], -1)
        writer.add_tensor(name, blocks, raw_dtype=stored)
    for name, extra in (more or {}).items():
        writer.add_tensor(name, extra.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def laid_out(family: str, checkpoint: Path) -> dict[str, tuple[NDArray[np.float32], str]]:
    """By the file's names the tensors as it has them, and the checkpoint's names."""
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = _ARCHITECTURES.get(family, family)
    kind = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    found = dict[str, tuple[NDArray[np.float32], str]]()
    for name, weight in _stacked(load_file(checkpoint / "model.safetensors")).items():
        stem, _, ending = name.rpartition(".")
        order = _order(family, config, name, weight.shape[0])
        tensor = weight[order] + float(_raised(family, name))
        found[f"{names.get_name(stem)}.{ending}"] = (tensor.float().numpy(), name)
    return found


def _stacked(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All experts of a layer in one tensor, by the names of Qwen's."""
    found, experts = dict[str, torch.Tensor](), dict[str, list[torch.Tensor]]()
    for name in sorted(tensors):  # of fewer than ten experts
        ours = name.replace("block_sparse_moe", "mlp")
        for theirs, plain in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
            ours = ours.replace(f".{theirs}.", f".{plain}.")
        if ".experts." in ours:
            experts.setdefault(re.sub(r"experts\.\d+", "experts", ours), []).append(tensors[name])
        else:
            found[ours] = tensors[name]
    return found | {name: torch.stack(each) for name, each in experts.items()}


def reference(family: str, checkpoint: Path, *files: Path) -> Any:
    """The model of the checkpoint, in float32, with the weights that the files have."""
    model: Any = AutoModelForCausalLM.from_pretrained(str(checkpoint), dtype=torch.float32)
    config = model.config.to_dict()
    names = {name: ours for name, (_, ours) in laid_out(family, checkpoint).items()}
    weights = dict[str, torch.Tensor]()
    for tensor in (one for file in files for one in gguf.GGUFReader(file).tensors):
        plain = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        name = names[tensor.name]
        order = _order(family, config, name, plain.shape[0]).argsort()
        weights[name] = plain[order] - float(_raised(family, name))
    for gate in [name for name in weights if name.endswith("experts.gate_proj.weight")]:
        stem = gate.removesuffix("gate_proj.weight")
        both = weights.pop(gate), weights.pop(f"{stem}up_proj.weight")
        weights[f"{stem}gate_up_proj"] = torch.cat(both, dim=1)
        weights[f"{stem}down_proj"] = weights.pop(f"{stem}down_proj.weight")
    missing = model.load_state_dict(weights, strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}
    model.train(False)
    return model


def drawn_blocks(kind: str, like: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Of a type of `SCALED`, for a matrix of the shape and about the spread of `like`."""
    random = np.random.default_rng(like.size + int(abs(like[0, 0]) * 1e6))
    rows, values = like.shape
    of_block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (rows, values // of_block, size), dtype=np.uint8)
    for place in SCALED[kind]:
        blocks[..., place : place + 2] = np.frombuffer(np.float16(1e-3).tobytes(), np.uint8)
    plain = gguf.dequantize(blocks.reshape(rows, -1), gguf.GGMLQuantizationType[kind])
    scale = np.float16(1e-3 * like.std() / plain.std())
    for place in SCALED[kind]:
        blocks[..., place : place + 2] = np.frombuffer(scale.tobytes(), np.uint8)
    return blocks.reshape(rows, -1)


def _order(family: str, config: Mapping[str, Any], name: str, rows: int) -> torch.Tensor:
    """The rows of a checkpoint's tensor, as the file has them."""
    order = torch.arange(rows)
    if family in ("llama", "mixtral") and "q_proj" in name:
        return _rotated_pairs(order, config["num_attention_heads"])
    if family in ("llama", "mixtral") and "k_proj" in name:
        return _rotated_pairs(order, config["num_key_value_heads"])
    return order


def _rotated_pairs(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Within each head, row i of the first half goes to 2i, of the second to 2i + 1."""
    return rows.reshape(heads, 2, -1).transpose(1, 2).reshape(-1)


def _raised(family: str, name: str) -> bool:
    """Gemmas multiply by 1 + weight, and files have the sum."""
    return family.startswith("gemma") and "norm" in name


def _put_facts(writer: gguf.GGUFWriter, family: str, config: Mapping[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(float(rope.get("full_attention", rope)["rope_theta"]))
    if family in MIXTURES:
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
    if family == "qwen3moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if family in ("gemma2", "gemma3"):
        writer.add_sliding_window(config["sliding_window"])
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def put_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path, vocab_size: int, pre: str) -> None:
    """Byte-level BPE; rows beyond the tokenizer are unused."""
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    merges = tokenizer["model"]["merges"]
    special = {one["content"] for one in tokenizer["added_tokens"]}
    tokens = tokens_of(checkpoint, vocab_size)
    known = set(tokenizer["model"]["vocab"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if one in special else 1 if one in known else 5 for one in tokens])
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    writer.add_eos_token_id(0)


def tokens_of(checkpoint: Path, vocab_size: int) -> list[str]:
    """The tokens of a checkpoint's tokenizer by their ids."""
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    added = {one["content"]: one["id"] for one in tokenizer["added_tokens"]}
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    for text, index in {**tokenizer["model"]["vocab"], **added}.items():
        tokens[index] = text
    return tokens


def _put_sentencepiece(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """Three special tokens, the bytes, and pieces of which the first is the likeliest."""
    pieces = ["\u2581", *"theandi", "th", "\u2581th", "\u2581the", "an", "\u2581an", "\u2581and"]
    texts = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    texts += dict.fromkeys(pieces)
    types = [2, 3, 3, *[6] * 256, *[1] * (len(texts) - 259)]
    unused = vocab_size - len(texts)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*texts, *[f"[PAD{one}]" for one in range(unused)]])
    writer.add_token_types([*types, *[5] * unused])
    writer.add_token_scores([float(-place) for place in range(vocab_size)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def put_fact(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    for kind, put in (
        (bool, writer.add_bool),
        (int, writer.add_uint32),
        (float, writer.add_float32),
        (str, writer.add_string),
        (list, writer.add_array),
    ):
        if isinstance(value, kind):
            put(name, value)
            return
    raise TypeError(name)
