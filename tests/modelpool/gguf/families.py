"""Families whose tensors llama.cpp's converter changes, and GGUF files of them as it writes them.

Contract: a row says what the converter does to a family. Files are written from the parameters of
a small random model, apart from what reads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    FalconH1Config,
    Gemma4TextConfig,
    Glm4Config,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Ministral3Config,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    SmolLM3Config,
)

from test_support.factories import MAX_POSITIONS, SLIDING_WINDOW, edit_weights, save_model
from tests.modelpool.gguf.files import put_fact, put_tokenizer

Config = Mapping[str, Any]
# Of a parameter: by the file's names after the layer's, or "" for that of the package `gguf`.
Change = Callable[[Tensor, Config], Mapping[str, Tensor]]
HIDDEN, HEADS, KV_HEADS = 64, 4, 2
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_IN_TURN = [_SLIDING, _FULL] * 2


@dataclass(frozen=True, kw_only=True)
class Family:
    """
    Attributes:
        facts: beside those that all have; None: it has none of that name.
        changes: by patterns of parameters, what is not written as it is.
        more: further tensors.
        tolerance: of the logits, relative to their size; 0: their bits are the same.
    """

    architecture: str
    kind: Any
    settings: Config = field(default_factory=dict)
    facts: Callable[[Config], Config] = lambda _: {}
    changes: Mapping[str, Change] = field(default_factory=dict)
    more: Callable[[Config], Mapping[str, Tensor]] = lambda _: {}
    tolerance: float = 0.0


def save(family: str, folder: Path, **others: Any) -> Path:
    """A checkpoint in float32."""
    row = FAMILIES[family]
    settings: dict[str, Any] = {"hidden": HIDDEN, "layers": 4, "dtype": "float32", **row.settings}
    save_model(row.kind, folder, **settings | others)
    edit_weights(folder, _told_apart)
    return folder


def _told_apart(weights: dict[str, Tensor]) -> None:
    """Numbers that are all alike become others; those that 1 is added to and taken from again are
    numbers that this leaves as they are."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if name.endswith(("correction_bias", "expert_bias", "layer_scalar")):
            weight.add_(torch.rand(weight.shape, generator=generator) * 0.2)
        elif name.endswith("norm.weight"):
            weight.copy_((weight + 1.0) - 1.0)


def write(family: str, checkpoint: Path, file: Path, kind: str = "F32") -> Path:
    """`kind`: of matrices whose rows are whole blocks."""
    row, config = FAMILIES[family], json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(file, row.architecture)
    put_tokenizer(writer, checkpoint, config["vocab_size"], "gpt-2")
    for name, value in {**_common_facts(config), **row.facts(config)}.items():
        if value is not None:
            put_fact(writer, f"{row.architecture}.{name}", value)
    for name, tensor in _tensors(row, checkpoint, config):
        plain = tensor.contiguous().numpy()
        is_whole = tensor.dim() > 1 and tensor.shape[-1] % 32 == 0 and tensor.numel() > 1024
        stored = gguf.GGMLQuantizationType[kind if is_whole and "conv" not in name else "F32"]
        writer.add_tensor(name, gguf.quantize(plain, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _tensors(row: Family, checkpoint: Path, config: Config) -> Iterator[tuple[str, Tensor]]:
    model: Any = AutoModelForCausalLM.from_pretrained(str(checkpoint), dtype=torch.float32)
    arch = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == row.architecture)
    table = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for parameter, tensor in model.state_dict().items():
        if parameter == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        found = (one for end, one in row.changes.items() if re.search(end, parameter))
        change = next(found, lambda one, _: {"": one})
        layer = re.search(r"\.layers\.(\d+)\.", parameter)
        usual = table.get_name(parameter, try_suffixes=(".weight", ".bias"))
        for name, changed in change(tensor, config).items():
            yield (f"blk.{layer[1]}.{name}" if name and layer else usual), changed
    yield from row.more(config).items()


def _common_facts(config: Config) -> Config:
    rope = config["rope_parameters"]
    head = config.get("head_dim")
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps", config.get("norm_eps")),
        "rope.freq_base": float(rope.get(_FULL, rope)["rope_theta"]),
    }


# What the converter does to tensors.


def _renamed(name: str) -> Change:
    return lambda tensor, _: {name: tensor}


def _in_pairs(heads: str) -> Change:
    """Of each head the two numbers that are rotated together stand side by side."""

    def change(tensor: Tensor, config: Config) -> Mapping[str, Tensor]:
        halves = tensor.reshape(config[heads], 2, -1, *tensor.shape[1:])
        return {"": halves.swapaxes(1, 2).reshape(tensor.shape)}

    return change


def _halved(first: str, second: str) -> Change:
    """Of each expert or layer the first outputs, and the others."""
    return lambda tensor, _: dict(zip((first, second), tensor.chunk(2, dim=-2), strict=True))


def _tiled(rows: int, size: Callable[[Config], int], dim: int = 0) -> Change:
    """Heads of values that share one of keys stand apart. `rows`: of these, before them."""

    def change(tensor: Tensor, config: Config) -> Mapping[str, Tensor]:
        keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        before = rows * keys * config["linear_key_head_dim"]
        tensor = (tensor.squeeze(1) if tensor.dim() == 3 else tensor).movedim(dim, 0)
        heads = tensor[before:].reshape(keys, values // keys, size(config), *tensor.shape[1:])
        tiled = heads.swapaxes(0, 1).reshape(tensor[before:].shape)
        return {"": torch.cat((tensor[:before], tiled)).movedim(0, dim)}

    return change


def _named(name: str, change: Change) -> Change:
    return lambda tensor, config: {name: change(tensor, config)[""]}


def _split_latents(tensor: Tensor, config: Config) -> Mapping[str, Tensor]:
    keys, heads = config["qk_nope_head_dim"], config["num_attention_heads"]
    both = tensor.reshape(heads, -1, tensor.shape[-1])
    return {"attn_k_b.weight": both[:, :keys].swapaxes(1, 2), "attn_v_b.weight": both[:, keys:]}


def _untwined(first: str, second: str) -> Change:
    """Every other output, and the rest; of matrices inputs come last."""

    def change(tensor: Tensor, _: Config) -> Mapping[str, Tensor]:
        outputs = tensor.swapaxes(1, 2) if tensor.dim() == 3 else tensor
        parts = (outputs[:, start::2] for start in (0, 1))
        return dict(zip((first, second), parts, strict=True))

    return change


def _times(factor: Callable[[Config], Any], change: Change = lambda one, _: {"": one}) -> Change:
    return lambda tensor, config: {
        name: one * factor(config) for name, one in change(tensor, config).items()
    }


def _falcon_input(config: Config) -> Tensor:
    """[rows, 1] what the rows of a Mamba's input are multiplied by."""
    groups = config["mamba_n_groups"] * config["mamba_d_state"]
    inner = config["mamba_d_ssm"]
    sizes = torch.tensor([inner, inner, groups, groups, config["mamba_n_heads"]])
    factors: Tensor = torch.tensor(config["ssm_multipliers"]) * config["ssm_in_multiplier"]
    return factors.repeat_interleave(sizes)[:, None]


def _gemma4_frequencies(config: Config) -> Mapping[str, Tensor]:
    head = next(iter(config["per_layer_config"].values()))["head_dim"]
    turned = int(head * config["rope_parameters"][_FULL]["partial_rotary_factor"] / 2)
    factors = torch.full((head // 2,), 1e30)
    factors[:turned] = 1.0
    return {"rope_freqs.weight": factors}


_PAIRS: Mapping[str, Change] = {
    r"q_proj\.": _in_pairs("num_attention_heads"),
    r"k_proj\.": _in_pairs("num_key_value_heads"),
}
_EXPERTS: Mapping[str, Change] = {
    r"experts\.gate_up_proj$": _halved("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    r"experts\.down_proj$": _renamed("ffn_down_exps.weight"),
}
_VALUE = lambda config: config["linear_value_head_dim"]  # noqa: E731
_RAISED: Change = lambda tensor, _: {"": tensor + 1.0}  # noqa: E731
_NEGATIVE: Change = lambda tensor, _: {"": -tensor.exp()}  # noqa: E731
_COLUMN: Change = lambda tensor, _: {"": tensor[:, None]}  # noqa: E731
_SQUEEZED: Change = lambda tensor, _: {"": tensor.squeeze(1)}  # noqa: E731
_DELTANET: Mapping[str, Change] = {
    r"in_proj_qkv\.": _tiled(2, _VALUE),
    r"in_proj_z\.": _tiled(0, _VALUE),
    r"conv1d\.": _tiled(2, _VALUE),
    r"in_proj_[ab]\.": _tiled(0, lambda _: 1),
    r"A_log$": lambda tensor, config: _NEGATIVE(_tiled(0, lambda _: 1)(tensor, config)[""], config),
    r"dt_bias$": _named("ssm_dt.bias", _tiled(0, lambda _: 1)),
    r"linear_attn\.out_proj\.": _tiled(0, _VALUE, dim=1),
    r"(?<!linear_attn\.)norm\.weight$": _RAISED,
}
_MAMBA2: Mapping[str, Change] = {
    r"A_log$": lambda tensor, config: _COLUMN(-tensor.exp(), config),
    r"mamba\.D$": _COLUMN,
    r"conv1d\.weight$": _SQUEEZED,
    r"dt_bias$": _renamed("ssm_dt.bias"),
    r"mamba\.norm\.": lambda one, config: {"": one.reshape(config["mamba_n_groups"], -1)},
}
_GPT_OSS: Mapping[str, Change] = {
    r"experts\.gate_up_proj$": _untwined("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    r"experts\.gate_up_proj_bias$": _untwined("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    r"experts\.down_proj$": lambda one, _: {"ffn_down_exps.weight": one.swapaxes(1, 2)},
    r"experts\.down_proj_bias$": _renamed("ffn_down_exps.bias"),
    r"sinks$": _renamed("attn_sinks.weight"),
}
_GEMMA4: Mapping[str, Change] = {
    r"experts\.gate_up_proj$": _renamed("ffn_gate_up_exps.weight"),
    r"experts\.down_proj$": _renamed("ffn_down_exps.weight"),
    r"router\.scale$": _renamed("ffn_gate_inp.scale"),
    r"router\.per_expert_scale$": _renamed("ffn_down_exps.scale"),
    r"layer_scalar$": _renamed("layer_output_scale.weight"),
}
_DEEPSEEK: Mapping[str, Change] = {
    **_EXPERTS,
    r"kv_b_proj\.": _split_latents,
    r"correction_bias$": _renamed("exp_probs_b.bias"),
}
_FALCON_H1: Mapping[str, Change] = {
    r"down_proj\.": _times(lambda config: config["mlp_multipliers"][1]),
    r"gate_proj\.": _times(lambda config: config["mlp_multipliers"][0]),
    r"k_proj\.": _times(lambda one: one["key_multiplier"] * one["attention_in_multiplier"]),
    r"[qv]_proj\.": _times(lambda config: config["attention_in_multiplier"]),
    r"o_proj\.": _times(lambda config: config["attention_out_multiplier"]),
    r"out_proj\.": _times(lambda config: config["ssm_out_multiplier"]),
    r"in_proj\.": _times(_falcon_input),
    r"lm_head\.": _times(lambda config: config["lm_head_multiplier"]),
    r"embed_tokens\.": _times(lambda config: config["embedding_multiplier"]),
    **_MAMBA2,
}


# What the converter says of configurations.


def _experts_facts(config: Config) -> Config:
    count = next(config[one] for one in ("num_local_experts", "num_experts", "n_routed_experts")
                 if config.get(one))  # fmt: skip
    used = config.get("num_experts_per_tok") or config["top_k_experts"]
    return {
        "expert_count": count,
        "expert_used_count": used,
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
    }


def _yarn_facts(config: Config) -> Config:
    rope = config["rope_parameters"]
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": float(rope["beta_fast"]),
        "rope.scaling.yarn_beta_slow": float(rope["beta_slow"]),
    }


def _partial_facts(config: Config) -> Config:
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {"rope.dimension_count": int(head * config["rope_parameters"]["partial_rotary_factor"])}


def _deltanet_facts(config: Config) -> Config:
    values, size = config["linear_num_value_heads"], config["linear_value_head_dim"]
    return {
        **_partial_facts(config),
        "rope.dimension_sections": [*config["rope_parameters"]["mrope_section"], 0],
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": values,
        "ssm.inner_size": values * size,
        "full_attention_interval": 2,
    }


def _deltanet_moe_facts(config: Config) -> Config:
    """With a layer that guesses the next but one."""
    layers = config["num_hidden_layers"]
    return {
        **_deltanet_facts(config),
        **_experts_facts(config),
        "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
        "block_count": layers + 1,
        "nextn_predict_layers": 1,
        "full_attention_interval": None,
        "attention.recurrent_layers": [one == _LINEAR for one in [*config["layer_types"], _FULL]],
    }


def _guessing_layer(config: Config) -> Mapping[str, Tensor]:
    width = config["hidden_size"]
    return {
        f"blk.{config['num_hidden_layers']}.{name}.weight": torch.zeros(shape)
        for name, shape in (("attn_norm", (width,)), ("nextn.eh_proj", (width, 2 * width)))
    }


def _gemma4_facts(config: Config) -> Config:
    layers, full = config["num_hidden_layers"], config["per_layer_config"]
    shared, width = config["num_kv_shared_layers"], config["intermediate_size"]
    wide = layers - shared if config["use_double_wide_mlp"] else layers
    kinds = config["layer_types"]
    kv_heads = [full.get(str(layer), {}).get("num_key_value_heads", config["num_key_value_heads"])
                for layer in range(layers)]  # fmt: skip
    head = next(iter(full.values()))["head_dim"]
    return {
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.head_count_kv": kv_heads,
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == _SLIDING for kind in kinds],
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"] or 0,
        "feed_forward_length": [width * (1 + (layer >= wide)) for layer in range(layers)],
        "final_logit_softcapping": config["final_logit_softcapping"],
        "rope.dimension_count": head,
        "rope.dimension_count_swa": config["head_dim"],
        "rope.freq_base_swa": config["rope_parameters"][_SLIDING]["rope_theta"],
        **(_experts_facts(config) if config["enable_moe_block"] else {}),
    }


def _gpt_oss_facts(config: Config) -> Config:
    return {
        **_experts_facts(config),
        **_yarn_facts(config),
        "expert_feed_forward_length": config["intermediate_size"],
        "attention.sliding_window": config["sliding_window"],
    }


def _phi3_facts(config: Config) -> Config:
    return {
        **_partial_facts(config),
        "rope.scaling.original_context_length": config["original_max_position_embeddings"],
        "attention.sliding_window": config["sliding_window"] or 0,
    }


def _long_facts(config: Config) -> Config:
    original = config["original_max_position_embeddings"]
    scale = torch.tensor(config["max_position_embeddings"] / original, dtype=torch.float64).log()
    longer = 1 + scale / torch.tensor(original, dtype=torch.float64).log()
    return {**_phi3_facts(config), "rope.scaling.attn_factor": float(longer.sqrt())}


def _long_factors(config: Config) -> Mapping[str, Tensor]:
    return {
        f"rope_factors_{length}.weight": torch.tensor(config["rope_parameters"][f"{length}_factor"])
        for length in ("long", "short")
    }


def _ministral_facts(config: Config) -> Config:
    rope = config["rope_parameters"]
    return {
        **_yarn_facts(config),
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def _granite_facts(config: Config) -> Config:
    return {
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
        **(_experts_facts(config) if config.get("num_local_experts") else {}),
    }


def _mamba2_facts(config: Config) -> Config:
    return {
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.time_step_rank": config["mamba_n_heads"],
        "ssm.inner_size": config["mamba_n_heads"] * config["mamba_d_head"],
    }


def _granite_hybrid_facts(config: Config) -> Config:
    kv_heads = config["num_key_value_heads"]
    return {
        **_granite_facts(config),
        **_mamba2_facts(config),
        "attention.head_count_kv": [kv_heads * (one == _FULL) for one in config["layer_types"]],
        "expert_shared_feed_forward_length": config["shared_intermediate_size"],
        "rope.scaling.finetuned": False,
    }


def _olmo3_facts(config: Config) -> Config:
    return {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [one == _SLIDING for one in config["layer_types"]],
        "rope.freq_base_swa": config["rope_parameters"][_SLIDING]["rope_theta"],
    }


def _deepseek_facts(config: Config) -> Config:
    latent, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    is_v3, rope = "topk_method" not in config, config["rope_parameters"]
    return {
        **_experts_facts(config),
        **(_yarn_facts(config) if rope["rope_type"] == "yarn" else {}),
        "rope.scaling.yarn_log_multiplier": 0.1 * rope.get("mscale_all_dim", 0.0) or None,
        "attention.head_count_kv": 1,
        "attention.key_length": latent + rotated,
        "attention.value_length": latent,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "attention.kv_lora_rank": latent,
        "attention.q_lora_rank": config["q_lora_rank"],
        "rope.dimension_count": rotated,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": True if is_v3 else None,
        "expert_gating_func": 2 if is_v3 else 1,
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
    }


def _old_deepseek_facts(config: Config) -> Config:
    """Before latents were kept."""
    key = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    return {
        **_deepseek_facts(config),
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": key,
        "attention.value_length": config["v_head_dim"],
        "attention.key_length_mla": None,
        "attention.value_length_mla": None,
        "expert_gating_func": None,
        "expert_group_count": None,
        "expert_group_used_count": None,
    }


def _lfm2_facts(config: Config) -> Config:
    kv_heads, is_mixture = config["num_key_value_heads"], "num_experts" in config
    return {
        "attention.head_count_kv": [kv_heads * (one == _FULL) for one in config["layer_types"]],
        "shortconv.l_cache": config["conv_L_cache"],
        **(_experts_facts(config) if is_mixture else {}),
        "leading_dense_block_count": config.get("num_dense_layers"),
        "expert_gating_func": 2 if is_mixture else None,
    }


_YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": MAX_POSITIONS // 4,
}  # fmt: skip
_MROPE = {
    "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1], "mrope_interleaved": True,
}  # fmt: skip
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.125, 1.25, 1.375, 1.5, 1.625],
    "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
    "original_max_position_embeddings": MAX_POSITIONS // 4,
}  # fmt: skip
_LINEAR_HEADS = {
    "layer_types": [_LINEAR, _FULL] * 2, "num_hidden_layers": 4, "rope_parameters": _MROPE,
    "head_dim": HIDDEN // HEADS, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 16, "linear_value_head_dim": 8,
}  # fmt: skip
_FOUR_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN // 2}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GEMMA4_SIZES = {
    "layer_types": _IN_TURN, "sliding_window": SLIDING_WINDOW, "head_dim": HIDDEN // HEADS,
    "global_head_dim": HIDDEN // 2, "final_logit_softcapping": 30.0,
}  # fmt: skip
_GRANITE = {
    "embedding_multiplier": 12.0, "attention_multiplier": 0.125, "residual_multiplier": 0.5,
    "logits_scaling": 8.0,
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2,
    "moe_intermediate_size": HIDDEN // 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
    "kv_heads": HEADS,
}  # fmt: skip
_MSCALE = {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
_ROUNDED = 1e-5  # where the converter's arithmetic is not undone to the last bit

FAMILIES: Mapping[str, Family] = {
    "qwen35": Family(
        architecture="qwen35", kind=Qwen3_5TextConfig, settings=_LINEAR_HEADS,
        facts=_deltanet_facts, changes=_DELTANET, tolerance=_ROUNDED,
    ),
    "qwen35moe": Family(
        architecture="qwen35moe", kind=Qwen3_5MoeTextConfig,
        settings={**_LINEAR_HEADS, **_FOUR_EXPERTS, "shared_expert_intermediate_size": 32},
        facts=_deltanet_moe_facts, changes={**_DELTANET, **_EXPERTS}, more=_guessing_layer,
        tolerance=_ROUNDED,
    ),
    "gpt-oss": Family(
        architecture="gpt-oss", kind=GptOssConfig,
        settings={"rope_parameters": {**_YARN, "truncate": False}},
        facts=_gpt_oss_facts, changes=_GPT_OSS,
    ),
    "gemma4 e2b": Family(
        architecture="gemma4", kind=Gemma4TextConfig, facts=_gemma4_facts, changes=_GEMMA4,
        settings={**_GEMMA4_SIZES, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
                  "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 320},
        more=_gemma4_frequencies,
    ),
    "gemma4 26b-a4b": Family(
        architecture="gemma4", kind=Gemma4TextConfig, facts=_gemma4_facts, changes=_GEMMA4,
        settings={**_GEMMA4_SIZES, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
                  "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4,
                  "top_k_experts": 2, "moe_intermediate_size": HIDDEN // 2},
        more=_gemma4_frequencies,
    ),
    "phi3": Family(
        architecture="phi3", kind=Phi3Config, facts=_phi3_facts,
        settings={"sliding_window": SLIDING_WINDOW,
                  "original_max_position_embeddings": MAX_POSITIONS},
    ),
    "phi-4-mini": Family(
        architecture="phi3", kind=Phi3Config, facts=_long_facts, more=_long_factors,
        settings={"rope_parameters": _LONGROPE, "sliding_window": None,
                  "original_max_position_embeddings": MAX_POSITIONS // 4, "tied": True},
    ),
    "ministral3": Family(
        architecture="mistral3", kind=Ministral3Config, facts=_ministral_facts, changes=_PAIRS,
        settings={"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0,
                                      "llama_4_scaling_beta": 0.125}, "head_dim": 32},
    ),
    "mistral-small": Family(
        architecture="mistral3", kind=MistralConfig, changes=_PAIRS,
        settings={"sliding_window": None, "head_dim": 32},
    ),
    "granite": Family(
        architecture="granite", kind=GraniteConfig, settings=_GRANITE, facts=_granite_facts,
        changes=_PAIRS,
    ),
    "granitemoe": Family(
        architecture="granitemoe", kind=GraniteMoeConfig, settings={**_GRANITE, **_LOCAL_EXPERTS},
        facts=_granite_facts,
        changes={**_PAIRS, **_EXPERTS, r"router\.weight$": _renamed("ffn_gate_inp.weight")},
    ),
    "granitehybrid": Family(
        architecture="granitehybrid", kind=GraniteMoeHybridConfig, facts=_granite_hybrid_facts,
        settings={**_GRANITE, **_LOCAL_EXPERTS, "num_hidden_layers": 4,
                  "layer_types": [_LINEAR, _FULL] * 2, "shared_intermediate_size": HIDDEN // 2,
                  "mamba_n_heads": 8, "mamba_d_head": 16},
        changes={**_PAIRS, **_EXPERTS, **_MAMBA2,
                 r"router\.weight$": _renamed("ffn_gate_inp.weight"),
                 r"input_linear\.": _halved("ffn_gate_shexp.weight", "ffn_up_shexp.weight")},
        tolerance=_ROUNDED,
    ),
    "granitehybrid, dense": Family(
        architecture="granitehybrid", kind=GraniteMoeHybridConfig, facts=_granite_hybrid_facts,
        settings={**_GRANITE, "num_hidden_layers": 4, "layer_types": [_LINEAR, _FULL] * 2,
                  "mamba_n_heads": 8, "mamba_d_head": 16},
        changes={**_PAIRS, **_MAMBA2,
                 r"input_linear\.": _halved("ffn_gate.weight", "ffn_up.weight"),
                 r"output_linear\.": _renamed("ffn_down.weight")},
        tolerance=_ROUNDED,
    ),
    **{
        name: Family(
            architecture="glm4", kind=Glm4Config, facts=_partial_facts,
            settings={"head_dim": 32, "attention_bias": is_biased, "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        )
        for name, is_biased in (("glm4 9b", True), ("glm4 32b", False))
    },
    "smollm3": Family(architecture="smollm3", kind=SmolLM3Config, changes=_PAIRS),
    "olmo2": Family(architecture="olmo2", kind=Olmo2Config),
    "olmo3": Family(
        architecture="olmo2", kind=Olmo3Config, facts=_olmo3_facts,
        settings={"sliding_window": SLIDING_WINDOW, "layer_types": _IN_TURN},
    ),
    "deepseek2 v2": Family(
        architecture="deepseek2", kind=DeepseekV2Config, facts=_deepseek_facts, changes=_DEEPSEEK,
        settings={**_LATENT, "n_group": 2, "topk_group": 1, "rope_parameters": _MSCALE,
                  "topk_method": "group_limited_greedy"},
    ),
    "deepseek2 v2, old": Family(
        architecture="deepseek2", kind=DeepseekV2Config, facts=_old_deepseek_facts,
        changes=_EXPERTS, settings={**_LATENT, "q_lora_rank": None},
    ),
    "deepseek2 v3": Family(
        architecture="deepseek2", kind=DeepseekV3Config, facts=_deepseek_facts, changes=_DEEPSEEK,
        settings={**_LATENT, "n_group": 2, "topk_group": 1, "norm_topk_prob": True},
    ),
    "lfm2": Family(
        architecture="lfm2", kind=Lfm2Config, facts=_lfm2_facts,
        settings={"num_hidden_layers": 4, "layer_types": ["conv", _FULL] * 2,
                  "block_auto_adjust_ff_dim": False},
        changes={r"conv\.conv\.": _SQUEEZED},
    ),
    "lfm2moe": Family(
        architecture="lfm2moe", kind=Lfm2MoeConfig, facts=_lfm2_facts,
        settings={**_FOUR_EXPERTS, "layer_types": ["conv", _FULL] * 2, "num_dense_layers": 1},
        changes={**_EXPERTS, r"conv\.conv\.": _SQUEEZED,
                 r"expert_bias$": _renamed("exp_probs_b.bias")},
    ),
    "falcon-h1": Family(
        architecture="falcon-h1", kind=FalconH1Config, facts=_mamba2_facts, changes=_FALCON_H1,
        settings={"lm_head_multiplier": 0.5, "key_multiplier": 0.8, "ssm_in_multiplier": 1.2,
                  "attention_out_multiplier": 0.9, "ssm_multipliers": [0.7, 1.2, 0.8, 1.1, 0.9],
                  "mamba_rms_norm": True, "mamba_norm_before_gate": False, "head_dim": 16},
        tolerance=_ROUNDED,
    ),
    "qwen3vl": Family(
        architecture="qwen3vl", kind=Qwen3Config,
        facts=lambda _: {"rope.dimension_sections": [3, 3, 2, 0], "n_deepstack_layers": 3},
    ),
}  # fmt: skip
