"""Configurations of every class that writes texts, small enough to be served in a second.

Contract: what a configuration does at a length (windows, chunks, scales, rotations) it does within
the first hundred positions, and it has a layer of each kind. Sizes are given by the names that
classes have for them; a class takes those that it knows, and `EXTRAS` has what one needs beside.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any, Literal, cast

from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    PreTrainedConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

VOCAB_SIZE = 4096  # the bundled tokenizer's
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 4, 64, 4, 2, 16
WINDOW, SCALE_FROM, LONGEST = 32, 40, 512
_ORIGINAL = 64  # positions of a rotation that is stretched beyond them

# Of the part that writes. Names of the same size in several classes stand in one row.
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size": HIDDEN, "d_model": HIDDEN, "n_embd": HIDDEN, "emb_dim": HIDDEN,
    "embedding_size": HIDDEN, "word_embed_proj_dim": HIDDEN, "input_embedding_size": HIDDEN,
    "output_embedding_size": HIDDEN, "embedding_dim": HIDDEN,
    "num_hidden_layers": LAYERS, "n_layer": LAYERS, "n_layers": LAYERS, "num_layers": LAYERS,
    "decoder_layers": LAYERS, "encoder_layers": LAYERS, "num_decoder_layers": LAYERS,
    "num_encoder_layers": LAYERS, "num_blocks": LAYERS,
    "num_attention_heads": HEADS, "n_head": HEADS, "n_heads": HEADS, "num_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_attention_heads": HEADS, "attention_heads": HEADS,
    "num_decoder_attention_heads": HEADS, "num_encoder_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "num_kv_heads": KV_HEADS, "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM, "global_head_dim": 2 * HEAD_DIM, "swa_head_dim": HEAD_DIM,
    "rotary_dim": HEAD_DIM // 2, "kv_channels": HEAD_DIM, "d_head": HEAD_DIM, "dim_head": HEAD_DIM,
    "query_pre_attn_scalar": HEAD_DIM, "attention_head_size": HEAD_DIM,
    "intermediate_size": 2 * HIDDEN, "n_inner": 2 * HIDDEN, "decoder_ffn_dim": 2 * HIDDEN,
    "encoder_ffn_dim": 2 * HIDDEN, "ffn_dim": 2 * HIDDEN, "dim_ff": 2 * HIDDEN, "dff": 2 * HIDDEN,
    "d_inner": 2 * HIDDEN, "ffn_hidden_size": 2 * HIDDEN, "feed_forward_size": 2 * HIDDEN,
    "intermediate_size_mlp": 2 * HIDDEN, "dense_intermediate_size": 2 * HIDDEN,
    "prefix_dense_intermediate_size": 2 * HIDDEN,
    "max_position_embeddings": LONGEST, "n_positions": LONGEST, "n_ctx": LONGEST,
    "max_seq_len": LONGEST, "max_target_positions": LONGEST, "context_length": LONGEST,
    # Mixtures of experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "zero_expert_num": 2,
    "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2, "top_k_experts": 2,
    "moe_intermediate_size": HIDDEN // 2, "shared_expert_intermediate_size": HIDDEN // 2,
    "shared_intermediate_size": HIDDEN // 2, "expert_ffn_hidden_size": HIDDEN // 2,
    "moe_shared_expert_intermediate_size": HIDDEN // 2,
    "shared_experts_intermediate_size": HIDDEN // 2, "router_hidden_size": HIDDEN // 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_dense_layers": 1,
    "num_mtp_layers": 0, "num_nextn_predict_layers": 0,
    # Latent and sparse attention
    "q_lora_rank": 32, "kv_lora_rank": 16, "o_lora_rank": 32, "o_groups": 2,
    "qk_nope_head_dim": HEAD_DIM, "qk_rope_head_dim": HEAD_DIM // 2, "v_head_dim": HEAD_DIM,
    "index_head_dim": HEAD_DIM, "index_n_heads": 2, "index_topk": WINDOW,
    "index_block_size": 8, "index_topk_blocks": 2,
    # Recurrent layers
    "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_ssm": 128,
    "mamba_chunk_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 8,
    "state_size": 8, "chunk_size": 16, "n_mamba_heads": 2, "lru_width": HIDDEN,
    "n_groups": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": HEAD_DIM, "linear_value_head_dim": HEAD_DIM,
    "linear_num_heads": 2, "linear_head_dim": HEAD_DIM, "block_size": 16, "adapter_rank": 8,
    "attn_layer_period": 2, "attn_layer_offset": 1,
    # What begins at a length
    "sliding_window": WINDOW, "sliding_window_size": WINDOW, "attention_window_size": WINDOW,
    "window_size": WINDOW, "local_attention": 2 * WINDOW, "keep_window_size": WINDOW,
    "attention_chunk_size": WINDOW, "use_sliding_window": True, "max_window_layers": LAYERS // 2,
    "floor_scale": SCALE_FROM, "attn_scale": 0.5, "log_scaling_n_floor": SCALE_FROM,
    "log_scaling_alpha": 0.5, "original_max_position_embeddings": _ORIGINAL, "rel_extent": WINDOW,
    # Gemma
    "hidden_size_per_layer_input": HEAD_DIM, "laurel_rank": 8, "num_kv_shared_layers": 0,
    # Texts end where the tests say so
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "forced_eos_token_id": None,
    "suppress_tokens": None, "begin_suppress_tokens": None, "unpadded_vocab_size": VOCAB_SIZE,
    "is_decoder": True, "decoder_start_token_id": 0,
}  # fmt: skip
# Of towers and everything else that texts do not go through.
_TOWER: dict[str, Any] = {
    "hidden_size": 32, "embed_dim": 32, "d_model": 32, "dim": 32, "width": 32,
    "num_hidden_layers": 2, "depth": 2, "num_layers": 2, "encoder_layers": 2, "n_layer": 2,
    "num_attention_heads": 2, "num_heads": 2, "encoder_attention_heads": 2, "n_head": 2,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64, "encoder_ffn_dim": 64,
    "hidden_dim": 32, "image_size": 32, "patch_size": 16, "out_hidden_size": HIDDEN,
    "output_dim": HIDDEN, "projection_dim": HIDDEN, "num_position_embeddings": 16,
    "position_embedding_size": 16, "vocab_size": 64, "max_position_embeddings": 64,
    "encoder_hidden_size": 32, "output_proj_dims": HIDDEN, "embed_reg_loss": 0.0,
    "deepstack_visual_indexes": [0, 1], "fullatt_block_indexes": [1], "window_size": 32,
    "mlp_ratio": 2, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 64,
}  # fmt: skip
_SOFTMAX = frozenset({"full_attention", "sliding_attention"})
_PACK_DEPENDENT = frozenset({"longrope", "dynamic"})
_WRITES = ("text", "thinker", "llm", "language", "decoder", "generator")  # parts of composites

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SECTIONS = {"mrope_section": [3, 3, 2]}  # of half a head
_MROPE = {**_ROPE, **_SECTIONS}
_BOTH = {"sliding_attention": _MROPE, "full_attention": _MROPE}
_PICTURES = {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "embed_dim": 8,
             "num_embeddings": 64, "latent_channels": 8, "codebook_size": 64}  # fmt: skip
_IN_TURN = ["sliding_attention", "full_attention"] * (LAYERS // 2)
# By model type, what a class needs beside.
EXTRAS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "chameleon": {"vocabulary_map": {"<image>": 8, "IMGIMGAZ": 9}, "vq_config": _PICTURES},
    "cohere_compass_text": {"layer_types": _IN_TURN, "rope_parameters": _BOTH},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": KV_HEADS, "clip_qkv": 8.0},
             "ffn_config": {"ffn_hidden_size": 2 * HIDDEN, "moe_num_experts": 4, "moe_top_k": 2}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"] * (LAYERS // 2)},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": HEADS, "swa_kv_lora_rank": 16, "swa_q_lora_rank": 32,
                        "swa_qk_nope_head_dim": HEAD_DIM, "swa_v_head_dim": HEAD_DIM},
    "emu3": {"vocabulary_map": {"<image>": 8}, "vq_config": _PICTURES},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [32, 32]},
    "glm4v_moe_text": {"rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}},
    "glm5_next_text": {"num_key_value_heads": HEADS, "qk_rope_head_dim": 0},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2)},
    "inkling2_vision": {"text_hidden_size": HIDDEN},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "llama4_vision_model": {"projector_input_dim": 32, "projector_output_dim": HIDDEN,
                            "vision_output_dim": HIDDEN},
    "longcat_flash": {"head_dim": HEAD_DIM // 2},
    "mamba2": {"num_heads": 4, "head_dim": 32},
    "mistral4": {"qk_nope_head_dim": HEAD_DIM // 2, "head_dim": HEAD_DIM},
    "nemotron_h_omni": {"projector_hidden_size": HIDDEN, "vision_hidden_size": 32},
    "qwen2_5_omni_thinker": {"vision_start_token_id": VOCAB_SIZE},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": VOCAB_SIZE},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": HEAD_DIM,
                       "indexer_budget": WINDOW, "indexer_compress_ratio": 4},
    "reformer": {"axial_pos_embds_dim": (32, 32), "axial_pos_shape": (16, 32)},
    "roc_bert": {"shape_embed_dim": 8, "pronunciation_embed_dim": 8},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Family:
    """A small configuration of a class, and the class of the model that its checkpoints hold.

    `given`: goes before all other settings; of a composite's parts it has dictionaries.
    """

    name: str
    kind: str  # model type
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    expected: Literal["exact", "refused"] = "exact"  # of a named one
    inside: str = ""  # model type of a composite that checkpoints hold the model as a part of

    def config(self) -> PreTrainedConfig:
        kind = CONFIG_MAPPING[self.kind]
        alone = {"is_encoder_decoder": False} if self._is_causal else {}
        return kind(**_settings(kind, _TEXT, {**alone, **self.given}))

    def composite(self) -> PreTrainedConfig:
        """Of the checkpoint that the model is a part of."""
        return Family(self.name, self.inside, {"text_config": self.given}).config()

    @property
    def model(self) -> Any:
        """Of a composite, all of it."""
        causal, several = MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING
        found = (causal if self._is_causal else several)[CONFIG_MAPPING[self.kind]]
        return found[0] if isinstance(found, tuple) else found

    @property
    def _is_causal(self) -> bool:
        return self.kind not in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES


@functools.cache
def swept() -> tuple[Family, ...]:
    """Every model type that writes texts; with only full attention too where it has other layers,
    since what these are refused for would hide what else is wrong."""
    kinds = (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
    attending = [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if _has_other_layers(kind)]
    given = {"layer_types": ["full_attention"] * LAYERS}
    return (
        *(Family(kind, kind) for kind in dict.fromkeys(kinds)),
        *(Family(f"{kind}, full attention", kind, given) for kind in attending),
    )


def _has_other_layers(kind: str) -> bool:
    names = {field.name for field in dataclasses.fields(cast(Any, CONFIG_MAPPING[kind]))}
    default = CONFIG_MAPPING[kind]() if "layer_types" in names else None
    return bool(set(getattr(default, "layer_types", None) or ()) - _SOFTMAX)


def _settings(
    kind: type[PreTrainedConfig], sizes: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """What a class is made with. Its defaults say which kinds of layers and which parts it has."""
    given = {**EXTRAS.get(kind.model_type, {}), **given}
    names = {field.name: field.default for field in dataclasses.fields(cast(Any, kind))}
    other = {name: kind.attribute_map.get(name, name) for name in sizes.keys() - names}
    own = {other.get(name, name): value for name, value in sizes.items()}
    default = kind()
    chosen = _per_layer(default, sizes["num_hidden_layers"])
    chosen |= {name: _as_typed(own[name], names[name]) for name in own.keys() & names}
    if "qk_rope_head_dim" in names:  # which is what rotations go by
        chosen.pop("head_dim", None)
    if "kv_lora_rank" in names and "num_key_value_heads" in names:
        chosen["num_key_value_heads"] = HEADS
    ropes = getattr(default, "rope_parameters", None)
    ignored = getattr(kind, "ignore_keys_at_rope_validation", None) or set[str]()
    if "mrope_section" in ignored:
        chosen["rope_parameters"] = {**_ROPE, **(ropes or {}), **_SECTIONS}
    elif ropes and "rope_parameters" in names:
        chosen["rope_parameters"] = _small_ropes(ropes)
    chosen |= given
    for key, spec in kind.sub_configs_defaults.items():
        own = given.get(key, {})
        if isinstance(getattr(default, key), PreTrainedConfig) and own is not None:
            chosen[key] = _part(key, getattr(default, key), spec, own)
    return chosen


def _part(key: str, default: PreTrainedConfig, spec: Any, given: Mapping[str, Any]) -> Any:
    """A dictionary, of a composite's text part or of what stands beside it."""
    sizes = _TEXT if key.startswith(_WRITES) else _TOWER
    kind = CONFIG_MAPPING[given["model_type"]] if "model_type" in given else type(default)
    made = {**spec.init_kwargs, **_settings(kind, sizes, given)}
    return made | {"model_type": kind.model_type}


def _as_typed(value: Any, default: Any) -> Any:
    """Classes are strict: what is a float or a list by default must be one."""
    if value is None or isinstance(value, list | dict):
        return value
    if isinstance(default, list | tuple):
        return type(default)([value] * len(default))
    return float(value) if isinstance(default, float) else value


def _per_layer(default: PreTrainedConfig, count: int) -> dict[str, Any]:
    """What a configuration has a list of, with an entry for each layer: each kind in turn."""
    layers = getattr(default, "num_hidden_layers", None)
    found = {}
    for name, value in vars(default).items():
        if isinstance(value, list) and len(value) == layers and not isinstance(value[0], dict):
            kinds = list(dict.fromkeys(value))
            found[name] = list(itertools.islice(itertools.cycle(kinds), count))
    return found


def _small_ropes(ropes: Mapping[str, Any]) -> dict[str, Any]:
    """The same rotations, with what changes at a length changing early."""
    if any(isinstance(value, dict) for value in ropes.values()):
        return {
            key: _small_ropes(value) if isinstance(value, dict) else value
            for key, value in ropes.items()
        }
    kind = ropes.get("rope_type", ropes.get("type"))
    original = _ORIGINAL if kind in _PACK_DEPENDENT else SCALE_FROM
    small: dict[str, Any] = {
        "original_max_position_embeddings": original,
        "max_position_embeddings": LONGEST,
        **_SECTIONS,
    }
    return dict(ropes) | {name: value for name, value in small.items() if name in ropes}
