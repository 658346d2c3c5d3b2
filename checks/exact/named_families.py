"""The families that people run: all but one must be served exactly, by every check.

Their layers, shapes and scales are those of released checkpoints, made small.
"""

from collections.abc import Mapping
from typing import Any

from checks.exact.small_configs import HEAD_DIM, HIDDEN, SCALE_FROM, Family

_FULL, _SLIDING = "full_attention", "sliding_attention"
_WINDOWS_IN_TURN = {"layer_types": [_SLIDING, _FULL] * 2}
_EVERY_LAYER = {"layer_types": [_FULL] * 4}
# More attention than released ones have: else these texts depend on their last tokens alone.
_LFM2 = {"num_hidden_layers": 6, "layer_types": [_FULL, _FULL, _FULL, "conv", _FULL, _FULL]}
# Mamba-2: two groups of heads, of as many channels as `mamba_expand` makes.
_RECURRENT = "linear_attention"
_MAMBA_IN_TURN = {"layer_types": [_RECURRENT, _FULL] * 2}
_MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_head": 16}
_NEMOTRON = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "n_routed_experts": 4,
    "head_dim": HEAD_DIM,
}
_FALCON_H1 = {
    "mamba_d_ssm": 128,
    "ssm_multipliers": [0.7, 1.2, 0.8, 1.1, 0.9],
    "ssm_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "key_multiplier": 0.8,
    "lm_head_multiplier": 0.5,
}

# Gemma 4. E2B and E4B: layers that share keys and values, embeddings of each layer, wide MLPs.
_GEMMA4_E2B = {
    **_WINDOWS_IN_TURN,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 30.0,
}
# Heads and their sizes differ by the kind of layer, and in one kind values are keys.
_GEMMA4_31B = {
    **_WINDOWS_IN_TURN,
    "hidden_size_per_layer_input": 0,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 30.0,
}
_GEMMA4_26B = {
    **_GEMMA4_31B,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": HIDDEN // 2,
}
_GEMMA3N = {
    **_WINDOWS_IN_TURN,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": SCALE_FROM,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 4.0,
    "original_max_position_embeddings": SCALE_FROM,
}
_LLAMA4_SCALING = {**_YARN, "llama_4_scaling_beta": 0.5}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.1 * step for step in range(HEAD_DIM * 3 // 8)],
    "long_factor": [2.0 + step for step in range(HEAD_DIM * 3 // 8)],
    "original_max_position_embeddings": 64,
}
_LONG_FACTORS = {**_LONGROPE, "short_factor": _LONGROPE["long_factor"]}
_LATENT = {"v_head_dim": HEAD_DIM}  # keys have those without a rotation beside these
_GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.5,
    "logits_scaling": 8.0,
}


def _composite(kind: str, text: Mapping[str, Any], **beside: Any) -> Family:
    return Family(f"{kind}, composite", kind, {"text_config": text, **beside})


NAMED: tuple[Family, ...] = (
    Family("llama 3", "llama", {"rope_parameters": _LLAMA3_ROPE}),
    Family("mistral 7b", "mistral"),
    Family("qwen2.5", "qwen2", {"use_sliding_window": False, "rope_parameters": _YARN}),
    Family("qwen2 with windows", "qwen2"),
    Family("qwen3 8b", "qwen3", {"use_sliding_window": False}),
    Family("gemma 1", "gemma"),
    Family("gemma 2 9b", "gemma2", _WINDOWS_IN_TURN),
    Family("gemma 3 text", "gemma3_text", _WINDOWS_IN_TURN),
    Family("ministral 8b", "ministral", _WINDOWS_IN_TURN),
    Family("ministral 3 text", "ministral3", {"rope_parameters": _LLAMA4_SCALING}),
    Family("glm-4", "glm4"),
    Family("smollm 3", "smollm3", {"no_rope_layers": [1, 1, 1, 0], "use_sliding_window": False}),
    Family("granite 3", "granite", _GRANITE),
    Family("granite 4 micro", "granitemoehybrid", {**_GRANITE, **_EVERY_LAYER,
                                                   "num_local_experts": 0}),
    Family("olmo 2", "olmo2"),
    Family("olmo 3", "olmo3", _WINDOWS_IN_TURN),
    Family("command r", "cohere"),
    Family("command a", "cohere2", _WINDOWS_IN_TURN),
    Family("exaone 4", "exaone4", _WINDOWS_IN_TURN),
    Family("phi-2", "phi"),
    Family("phi-4-mini", "phi3", {"rope_parameters": _LONGROPE, "sliding_window": None}),
    Family("phi-4-mini, long factors", "phi3", {"rope_parameters": _LONG_FACTORS,
                                                "sliding_window": None}),
    Family("starcoder 1", "gpt_bigcode"),
    Family("starcoder 2", "starcoder2"),
    Family("seed-oss 36b", "seed_oss"),
    Family("hunyuan dense", "hunyuan_v1_dense"),
    Family("ernie 4.5 dense", "ernie4_5"),
    Family("apertus 8b", "apertus"),
    Family("pythia", "gpt_neox"),
    Family("opt 1.3b", "opt"),
    # Their layers drop what the forward is given beside
    Family("stablelm 2", "stablelm"),
    Family("nemotron", "nemotron"),
    Family("gpt-2", "gpt2"),
    # Mixtures of experts
    Family("qwen3 30b-a3b", "qwen3_moe", {"use_sliding_window": False}),
    Family("qwen1.5 moe", "qwen2_moe", {"use_sliding_window": False}),
    Family("mixtral 8x7b", "mixtral"),
    Family("glm-4.5", "glm4_moe"),
    Family("minimax m2", "minimax_m2"),
    Family("olmoe 1b-7b", "olmoe"),
    Family("phi-3.5-moe", "phimoe", {"sliding_window": None}),
    # Attention sinks
    Family("gpt-oss", "gpt_oss"),
    Family("granite swa", "granite_swa"),
    # Keys wider than values, or narrower
    Family("mimo v2 flash", "mimo_v2_flash", {"v_head_dim": 12}),
    Family("deepseek v2", "deepseek_v2", _LATENT),
    Family("deepseek v3", "deepseek_v3", _LATENT),
    Family("glm-4.7-flash", "glm4_moe_lite", {"v_head_dim": 24}),
    Family("minicpm 3", "minicpm3", _LATENT),
    # Gemma 4 and 3n, as text models and with what they see and hear
    Family("gemma 4 e2b", "gemma4_text", _GEMMA4_E2B),
    Family("gemma 4 31b", "gemma4_text", _GEMMA4_31B),
    Family("gemma 4 26b-a4b", "gemma4_text", _GEMMA4_26B),
    _composite("gemma4", _GEMMA4_E2B),
    Family("gemma 4 31b, composite", "gemma4", {"text_config": _GEMMA4_31B, "audio_config": None}),
    Family("gemma 4 26b-a4b, composite", "gemma4", {"text_config": _GEMMA4_26B,
                                                    "audio_config": None}),
    Family("gemma 3n text", "gemma3n_text", _GEMMA3N),
    Family("gemma 3n, composite", "gemma3n_text", _GEMMA3N, inside="gemma3n"),
    # Recurrent layers
    Family("qwen3.5 0.8b", "qwen3_5_text"),
    Family("qwen3.6 35b-a3b", "qwen3_5_moe_text"),
    Family("qwen3-next 80b-a3b", "qwen3_next"),
    Family("lfm2 1.2b", "lfm2", _LFM2),
    Family("lfm2 8b-a1b", "lfm2_moe", _LFM2),
    Family("granite 4 h-micro", "granitemoehybrid", {**_GRANITE, **_MAMBA_IN_TURN, **_MAMBA,
                                                     "num_local_experts": 0}),
    Family("granite 4 h-tiny", "granitemoehybrid", {**_GRANITE, **_MAMBA_IN_TURN, **_MAMBA}),
    Family("bamba 9b", "bamba", {"attn_layer_indices": [1, 3], **_MAMBA}),
    Family("nemotron-h 8b", "nemotron_h", {
        "layers_block_type": [_RECURRENT, "mlp", _FULL, _RECURRENT, "mlp"], **_NEMOTRON}),
    Family("nemotron 3 nano 30b-a3b", "nemotron_h", {
        "layers_block_type": [_RECURRENT, "moe", _FULL, _RECURRENT, "moe"], **_NEMOTRON}),
    Family("falcon h1 1.5b", "falcon_h1", {**_MAMBA, **_FALCON_H1}),
    Family("falcon h1, normed", "falcon_h1", {
        **_MAMBA, **_FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    Family("qwen3.5, composite", "qwen3_5_text", inside="qwen3_5"),
    Family("qwen3.6 moe, composite", "qwen3_5_moe_text", inside="qwen3_5_moe"),
    # Other composites
    _composite("gemma3", _WINDOWS_IN_TURN),
    _composite("mistral3", {"sliding_window": None}),
    Family("ministral 3, composite", "mistral3", {"text_config": {
        "model_type": "ministral3", "rope_parameters": _LLAMA4_SCALING}}),
    _composite("qwen3_vl", {}),
    _composite("qwen2_5_vl", {"use_sliding_window": False}),
    Family("qwen2_5_vl with windows", "qwen2_5_vl"),
    # Within their first chunk, where the tuning of temperature has not begun
    *(Family(f"llama 4, {name}", "llama4_text", {
        "no_rope_layers": [1, 1, 1, 0], "attention_chunk_size": chunk, "floor_scale": start})
      for name, chunk, start in (("chunks", 160, 512), ("tuned", 512, 161))),
)  # fmt: skip
