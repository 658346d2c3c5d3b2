"""Supported architectures of llama.cpp, with their settings in `transformers`.

Contract: an entry is data: settings by their facts, and tensors that differ in the file. If a file
lacks a setting that differs between models of the architecture, it is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from modelpool.gguf.facts import Facts
from modelpool.gguf.header import GgufHeader
from modelpool.gguf.rotation import (
    FREQUENCIES,
    LONG_FACTORS,
    full_rotation,
    local_rotation,
    long_rotation,
    mixed_rotation,
    partial_rotation,
    proportional_rotation,
    rotation,
    scaled_rotation,
    untruncated_rotation,
)

Config = dict[str, Any]
_EMBEDDING = "token_embd.weight"
_ROTATED, _NEXT = "rope.dimension_count", "nextn_predict_layers"
_LARGEST_GEMMAS = {"gemma2": 46, "gemma3": 62}  # layers of the models that scale scores differently
_SOFTMAX, _SIGMOID = 1, 2  # functions that choose experts


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture of llama.cpp.

    Attributes:
        kind: the model type of `transformers`.
        facts: the fact and its default by setting, or a type instead of a default if it is
            required.
        more: settings that follow from several facts, given those that were found.
        rope: `rope_parameters`, given the size of a head.
        has_whole_heads: keys and values are equally wide, and rotated as a whole, unless it
            `rotates_part`.
        rotates_part: only a part of each head is rotated.
        has_pairs: rotated pairs of queries and keys are adjacent.
        raised: pattern of the parameters to which the file adds 1.
        has_experts_in_turn: outputs of gates alternate with those that they multiply, and inputs
            come before outputs.
        rotating: tensors that are read as settings.
    """

    kind: str
    facts: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    more: Callable[[Facts, Config], Config] = lambda _, __: {}
    rope: Callable[[Facts, int], Config] = rotation
    has_whole_heads: bool = True
    rotates_part: bool = False
    has_pairs: bool = False
    raised: str = ""
    has_experts_in_turn: bool = False
    rotating: tuple[str, ...] = (FREQUENCIES,)


def architecture_of(header: GgufHeader) -> tuple[str, Architecture]:
    """Return the name in llama.cpp and the architecture; raise `ConfigError` if it is unknown."""
    name = header.fact("general.architecture", str)
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise header.error(f"general.architecture is {name!r}, which is not read; read: {known}")
    return name, ARCHITECTURES[name]


def config_of(header: GgufHeader) -> Config:
    """Return the configuration without text ends and dtype; check it against the embedding."""
    name, architecture = architecture_of(header)
    facts = Facts(header, name)
    if _EMBEDDING not in header.tensors:
        raise header.error(f"has no tensor {_EMBEDDING!r}")
    rows, width = header.tensors[_EMBEDDING].shape
    blocks, hidden = facts.size("block_count"), facts.size("embedding_length")
    heads = facts.size("attention.head_count")
    tokens = len(header.fact("tokenizer.ggml.tokens", list))
    for what, said, found in (
        (f"{name}.embedding_length", hidden, width),
        (f"{name}.vocab_size", facts.size("vocab_size", rows), rows),
        ("the length of tokenizer.ggml.tokens", tokens, rows),
    ):
        if said != found:
            raise header.error(f"{what} is {said}, and {_EMBEDDING!r} is [{rows}, {width}]")
    if blocks > len(header.tensors):
        raise facts.error("block_count", f"is {blocks}: more than there are tensors")
    layers = blocks - facts.count(_NEXT)  # layers that predict further tokens are not read
    if layers < 1:
        raise facts.error(_NEXT, f"is {facts.count(_NEXT)}, of {blocks} layers")
    head = facts.size("attention.key_length", max(hidden // heads, 1))
    config: Config = {
        "model_type": architecture.kind,
        "vocab_size": rows,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(facts.of_layers("attention.head_count_kv", layers, heads)),
        "head_dim": head,
        "max_position_embeddings": facts.size("context_length"),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": architecture.rope(facts, head),
        "pad_token_id": None,  # the default of a class may be beyond the vocabulary
    }
    rotated = head if architecture.rotates_part else facts.size(_ROTATED, head)
    is_whole = facts.size("attention.value_length", head) == rotated == head
    if architecture.has_whole_heads and not is_whole:
        raise header.error(f"{_ROTATED} or attention.value_length is not attention.key_length")
    if "intermediate_size" not in architecture.facts:
        config["intermediate_size"] = facts.of_layers("feed_forward_length", layers)[0]
    for setting, (fact, default) in architecture.facts.items():
        needed = isinstance(default, type)
        read = facts.number if (default if needed else type(default)) is float else facts.size
        config[setting] = read(fact) if needed else read(fact, default)
    return config | architecture.more(facts, config)


def _experts(facts: Facts, _: Config) -> Config:
    """Check that experts are chosen by a softmax, without shared ones or groups."""
    for name, served in (("gating_func", _SOFTMAX), ("shared_count", 0), ("group_count", 0)):
        if (found := facts.count(f"expert_{name}")) not in (served, 0):
            raise facts.error(f"expert_{name}", f"is {found}, which is not read")
    count, used = facts.size("expert_count"), facts.size("expert_used_count")
    if used > count:
        raise facts.error("expert_used_count", f"is {used}, of {count} experts")
    return {}


def _normed_experts(facts: Facts, config: Config) -> Config:
    return _experts(facts, config) | {"norm_topk_prob": True}  # llama.cpp does so for all of them


def _llama(facts: Facts, config: Config) -> Config:
    """Return the settings of Mixtral for a file with experts, which has the same architecture."""
    if not facts.count("expert_count"):
        return {}
    count, used = facts.size("expert_count"), facts.size("expert_used_count")
    kind = {"model_type": "mixtral", "num_local_experts": count, "num_experts_per_tok": used}
    return _experts(facts, config) | kind


def _gemma2(facts: Facts, config: Config) -> Config:
    return {"query_pre_attn_scalar": _scaled_head(facts, config)}


def _gemma3(facts: Facts, config: Config) -> Config:
    window, layers = facts.count("attention.sliding_window"), config["num_hidden_layers"]
    cap = facts.number("final_logit_softcapping", 0.0)
    return {
        "query_pre_attn_scalar": _scaled_head(facts, config),
        "layer_types": facts.windows(layers, 6) if window else ["full_attention"] * layers,
        **({"sliding_window": window} if window else {}),
        "final_logit_softcapping": cap or None,
    }


def _scaled_head(facts: Facts, config: Config) -> int:
    """Return the number by whose square root scores are divided."""
    if config["num_hidden_layers"] == _LARGEST_GEMMAS[facts.architecture]:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _gemma4(facts: Facts, config: Config) -> Config:
    """Return settings of heads, which differ by the kind of layer; some have keys as values."""
    layers = config["num_hidden_layers"]
    kinds, widths = facts.windows(layers, 6), facts.of_layers("feed_forward_length", layers)
    kv_heads = facts.of_layers("attention.head_count_kv", layers)
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    values = [f"blk.{layer}.attn_v.weight" for layer in full[:1]]
    experts = facts.count("expert_count")
    return {
        "layer_types": kinds,
        "head_dim": facts.size("attention.key_length_swa"),
        "num_key_value_heads": next(
            (kv_heads[layer] for layer in range(layers) if layer not in full), kv_heads[0]
        ),
        "per_layer_config": {
            str(layer): {"head_dim": config["head_dim"], "num_key_value_heads": kv_heads[layer]}
            for layer in full
        },
        "attention_k_eq_v": not set(values) <= facts.header.tensors.keys(),
        "sliding_window": facts.size("attention.sliding_window"),
        "num_kv_shared_layers": facts.count("attention.shared_kv_layers"),
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "hidden_size_per_layer_input": facts.count("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": config["vocab_size"],
        "final_logit_softcapping": facts.number("final_logit_softcapping", 0.0) or None,
        "enable_moe_block": bool(experts),
        **(_experts_of_gemma4(facts) if experts else {}),
    }


def _experts_of_gemma4(facts: Facts) -> Config:
    return {
        "num_experts": facts.size("expert_count"),
        "top_k_experts": facts.size("expert_used_count"),
        "moe_intermediate_size": facts.size("expert_feed_forward_length"),
    }


def _qwen35(facts: Facts, config: Config) -> Config:
    layers, interval = config["num_hidden_layers"], facts.size("full_attention_interval", 4)
    name, kinds = "attention.recurrent_layers", ("full_attention", "linear_attention")
    is_recurrent = [(layer + 1) % interval != 0 for layer in range(layers)]
    if f"{facts.architecture}.{name}" in facts.header.facts:
        is_recurrent = [bool(one) for one in facts.of_layers(name, layers)]
    heads = config["linear_num_value_heads"]
    return {
        "layer_types": [kinds[one] for one in is_recurrent],
        "linear_value_head_dim": facts.size("ssm.inner_size") // heads,
    }


def _gpt_oss(facts: Facts, config: Config) -> Config:
    return {"layer_types": facts.windows(config["num_hidden_layers"], 2)}


def _mistral3(facts: Facts, config: Config) -> Config:
    """Return settings of Mistral Small 3, or of Ministral 3, which scales scores in long texts."""
    scale, rope = facts.number("attention.temperature_scale", 0.0), config["rope_parameters"]
    if not scale:
        return {"model_type": "mistral", "sliding_window": None}
    return {"rope_parameters": rope | {"llama_4_scaling_beta": scale}}


def _granite(facts: Facts, config: Config) -> Config:
    if not facts.flag("rope.scaling.finetuned", True):
        raise facts.error("rope.scaling.finetuned", "is false: one without a rotation is not read")
    usual = config["head_dim"] ** -0.5
    return {"attention_multiplier": facts.number("attention.scale", 0.0) or usual}


def _granitemoe(facts: Facts, config: Config) -> Config:
    return _granite(facts, config) | _experts(facts, config)


def _granitehybrid(facts: Facts, config: Config) -> Config:
    layers, experts = config["num_hidden_layers"], facts.count("expert_count")
    kinds, usual = ("linear_attention", "full_attention"), config["head_dim"] ** -0.5
    shared = facts.count("expert_shared_feed_forward_length") or config["intermediate_size"]
    inner, heads = facts.size("ssm.inner_size"), config["mamba_n_heads"]
    return {
        "attention_multiplier": facts.number("attention.scale", 0.0) or usual,
        "layer_types": [
            kinds[bool(one)] for one in facts.of_layers("attention.head_count_kv", layers)
        ],
        "position_embedding_type": "rope" if facts.flag("rope.scaling.finetuned", False) else None,
        "shared_intermediate_size": shared,
        "num_local_experts": experts,
        "num_experts_per_tok": facts.count("expert_used_count"),
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // config["hidden_size"],
    }


def _olmo2(facts: Facts, config: Config) -> Config:
    """Return the settings of OLMo 3 for a file with windows."""
    window, full = facts.count("attention.sliding_window"), config["rope_parameters"]
    if not window:
        return {}
    theta = facts.number("rope.freq_base_swa", full["rope_theta"])
    local = {"rope_type": "default", "rope_theta": theta}
    return {
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": facts.windows(config["num_hidden_layers"], 4),
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


def _glm4(facts: Facts, _: Config) -> Config:
    return {"attention_bias": "blk.0.attn_q.bias" in facts.header.tensors}


def _phi3(facts: Facts, config: Config) -> Config:
    found: Config = {"sliding_window": facts.count("attention.sliding_window") or None}
    original = config["rope_parameters"].get("original_max_position_embeddings")
    return found | ({"original_max_position_embeddings": original} if original else {})


def _deepseek2(facts: Facts, config: Config) -> Config:
    """Return the sizes of heads with expanded latents; V3 chooses experts by a sigmoid."""
    rotated = facts.size(_ROTATED)
    key, value = (
        facts.size(f"attention.{one}_length_mla", facts.size(f"attention.{one}_length"))
        for one in ("key", "value")
    )
    gating, groups = facts.count("expert_gating_func"), facts.count("expert_group_count") or 1
    is_normed = facts.flag("expert_weights_norm", False)
    if gating not in (0, _SOFTMAX, _SIGMOID):
        raise facts.error("expert_gating_func", f"is {gating}, which is not read")
    found: Config = {
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rotated,  # the size from which its rotation is made
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "q_lora_rank": facts.count("attention.q_lora_rank") or None,
        "first_k_dense_replace": facts.count("leading_dense_block_count"),
        "n_group": groups,
        "topk_group": facts.count("expert_group_used_count") or 1,
        "norm_topk_prob": is_normed,
        "routed_scaling_factor": facts.number("expert_weights_scale", 0.0) or 1.0,
    }
    if gating == _SIGMOID:
        return found
    if is_normed:
        raise facts.error("expert_weights_norm", "is true beside a softmax, which is not read")
    method = "group_limited_greedy" if groups > 1 else "greedy"
    return found | {"model_type": "deepseek_v2", "topk_method": method}


def _lfm2(facts: Facts, config: Config) -> Config:
    if facts.count("attention.sliding_window"):
        raise facts.error("attention.sliding_window", "is not read")
    layers, kinds = config["num_hidden_layers"], ("conv", "full_attention")
    return {
        "norm_eps": config["rms_norm_eps"],
        "layer_types": [
            kinds[bool(one)] for one in facts.of_layers("attention.head_count_kv", layers)
        ],
        "conv_bias": any(name.endswith("shortconv.in_proj.bias") for name in facts.header.tensors),
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2moe(facts: Facts, config: Config) -> Config:
    if (found := facts.count("expert_gating_func")) != _SIGMOID:
        raise facts.error("expert_gating_func", f"is {found}, which is not read")
    dense = facts.count("leading_dense_block_count")
    return _lfm2(facts, config) | {"num_dense_layers": dense}


def _falcon_h1(facts: Facts, config: Config) -> Config:
    """Return settings without multipliers, which are part of the weights."""
    inner, heads = facts.size("ssm.inner_size"), config["mamba_n_heads"]
    return {
        "mamba_d_ssm": inner,
        "mamba_d_head": inner // heads,
        "mamba_conv_bias": "blk.0.ssm_conv1d.bias" in facts.header.tensors,
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in facts.header.tensors,
        "mamba_norm_before_gate": False,
    }


_EXPERTS = {
    "num_experts": ("expert_count", int),
    "num_experts_per_tok": ("expert_used_count", int),
    "moe_intermediate_size": ("expert_feed_forward_length", int),
}
_LOCAL_EXPERTS = {
    "num_local_experts": ("expert_count", int),
    "num_experts_per_tok": ("expert_used_count", int),
}
_GATED_DELTANET = {
    "linear_conv_kernel_dim": ("ssm.conv_kernel", int),
    "linear_key_head_dim": ("ssm.state_size", int),
    "linear_num_key_heads": ("ssm.group_count", int),
    "linear_num_value_heads": ("ssm.time_step_rank", int),
}
_MAMBA2 = {
    "mamba_d_conv": ("ssm.conv_kernel", int),
    "mamba_d_state": ("ssm.state_size", int),
    "mamba_n_groups": ("ssm.group_count", int),
    "mamba_n_heads": ("ssm.time_step_rank", int),
}
_GRANITE = {
    "embedding_multiplier": ("embedding_scale", 1.0),
    "residual_multiplier": ("residual_scale", 1.0),
    "logits_scaling": ("logit_scale", float),
}
_SHORT_CONVOLUTION = {"conv_L_cache": ("shortconv.l_cache", int)}
_NORMS = r"norm\.weight$"

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(kind="llama", more=_llama, has_pairs=True),
    "qwen2": Architecture(kind="qwen2"),
    "qwen3": Architecture(kind="qwen3"),
    "gemma": Architecture(kind="gemma", raised=_NORMS),
    "gemma2": Architecture(
        kind="gemma2",
        facts={
            "sliding_window": ("attention.sliding_window", 4096),
            "attn_logit_softcapping": ("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": ("final_logit_softcapping", 30.0),
        },
        more=_gemma2,
        raised=_NORMS,
    ),
    "gemma3": Architecture(kind="gemma3_text", more=_gemma3, rope=local_rotation, raised=_NORMS),
    "qwen3moe": Architecture(kind="qwen3_moe", facts=_EXPERTS, more=_normed_experts),
    "qwen3vl": Architecture(kind="qwen3"),  # a text has only one position per token
    "qwen3vlmoe": Architecture(kind="qwen3_moe", facts=_EXPERTS, more=_normed_experts),
    "qwen35": Architecture(
        kind="qwen3_5_text",
        facts=_GATED_DELTANET,
        more=_qwen35,
        rope=mixed_rotation,
        rotates_part=True,
        raised=r"(?<!linear_attn\.)norm\.weight$",
    ),
    "qwen35moe": Architecture(
        kind="qwen3_5_moe_text",
        facts={
            **_GATED_DELTANET,
            **_EXPERTS,
            "shared_expert_intermediate_size": ("expert_shared_feed_forward_length", int),
            "intermediate_size": ("feed_forward_length", 1),  # for layers that it does not have
        },
        more=_qwen35,
        rope=mixed_rotation,
        rotates_part=True,
        raised=r"(?<!linear_attn\.)norm\.weight$",
    ),
    "gpt-oss": Architecture(
        kind="gpt_oss",
        facts={
            **_LOCAL_EXPERTS,
            "intermediate_size": ("expert_feed_forward_length", int),
            "sliding_window": ("attention.sliding_window", int),
        },
        more=_gpt_oss,
        rope=untruncated_rotation,
        has_experts_in_turn=True,
    ),
    "gemma4": Architecture(
        kind="gemma4_text", more=_gemma4, rope=proportional_rotation, has_whole_heads=False
    ),
    "phi3": Architecture(
        kind="phi3",
        more=_phi3,
        rope=long_rotation,
        rotates_part=True,
        rotating=(FREQUENCIES, *LONG_FACTORS),
    ),
    "mistral3": Architecture(
        kind="ministral3", more=_mistral3, rope=scaled_rotation, has_pairs=True
    ),
    "granite": Architecture(kind="granite", facts=_GRANITE, more=_granite, has_pairs=True),
    "granitemoe": Architecture(
        kind="granitemoe", facts={**_GRANITE, **_LOCAL_EXPERTS}, more=_granitemoe, has_pairs=True
    ),
    "granitehybrid": Architecture(
        kind="granitemoehybrid",
        facts={**_GRANITE, **_MAMBA2},
        more=_granitehybrid,
        has_pairs=True,
    ),
    "glm4": Architecture(kind="glm4", more=_glm4, rope=partial_rotation, rotates_part=True),
    "smollm3": Architecture(kind="smollm3", has_pairs=True),
    "olmo2": Architecture(kind="olmo2", more=_olmo2, rope=full_rotation),
    "deepseek2": Architecture(
        kind="deepseek_v3",
        facts={
            "kv_lora_rank": ("attention.kv_lora_rank", int),
            "moe_intermediate_size": ("expert_feed_forward_length", int),
            "n_routed_experts": ("expert_count", int),
            "n_shared_experts": ("expert_shared_count", int),
            "num_experts_per_tok": ("expert_used_count", int),
        },
        more=_deepseek2,
        rope=scaled_rotation,
        has_whole_heads=False,
    ),
    "lfm2": Architecture(kind="lfm2", facts=_SHORT_CONVOLUTION, more=_lfm2),
    "lfm2moe": Architecture(
        kind="lfm2_moe", facts={**_SHORT_CONVOLUTION, **_EXPERTS}, more=_lfm2moe
    ),
    "falcon-h1": Architecture(kind="falcon_h1", facts=_MAMBA2, more=_falcon_h1),
}
