"""Of a composite the text model alone is served, under the names that its class has."""

from typing import Any

import pytest
from transformers import (
    Gemma3Config,
    Llama4Config,
    Llama4TextConfig,
    Mistral3Config,
    Qwen3Config,
    Qwen3VLConfig,
)

from modelpool.checkpoint.text_part import text_part


@pytest.mark.parametrize("kind", [Gemma3Config, Mistral3Config])
def test_a_composites_text_model_has_its_own_configuration(kind: Any) -> None:
    config = kind(tie_word_embeddings=True)
    part = text_part(config)
    assert part.is_composite
    assert type(part.config) is type(config.text_config)
    assert part.config.tie_word_embeddings
    assert part.config is not config.text_config, "it was changed, and is the caller's"


def test_a_text_model_without_a_class_of_its_own_is_one_that_computes_the_same() -> None:
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}
    text = {"hidden_size": 256, "head_dim": 128, "rope_parameters": rope}
    part = text_part(Qwen3VLConfig(text_config=text))
    assert type(part.config) is Qwen3Config
    assert (part.config.hidden_size, part.config.head_dim) == (256, 128)
    assert part.config.rope_parameters == {"rope_type": "default", "rope_theta": 5e6}


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ({}, 8191),
        ({"attention_chunk_size": 64}, 64),
        ({"attn_temperature_tuning": False}, 8192),
        ({"layer_types": ["full_attention"] * 48, "floor_scale": 100}, 99),
        ({"max_position_embeddings": 32}, 32),
    ],
)
def test_llama_4_is_served_to_where_its_attention_becomes_another(
    settings: dict[str, Any], longest: int
) -> None:
    config = Llama4TextConfig(**settings)
    kinds = list(config.layer_types or ())
    for part in (text_part(config), text_part(Llama4Config(text_config=config.to_dict()))):
        assert part.is_changed
        assert part.config.max_position_embeddings == longest
        assert set(part.config.layer_types) == {"full_attention"}
        assert not part.config.attn_temperature_tuning
    assert config.layer_types == kinds, "it is the caller's"


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
    ],
)
def test_weights_are_found_under_the_composites_names(stored: str, name: str) -> None:
    part = text_part(Gemma3Config())
    assert part.has(stored)
    assert part.rename(stored) == name


@pytest.mark.parametrize(
    "stored",
    [
        "model.vision_tower.layers.0.weight",
        "vision_tower.vision_model.embeddings.weight",
        "visual.blocks.0.attn.qkv.weight",
        "model.multi_modal_projector.norm.weight",
        "model.audio_tower.conv.weight",
        "mtp.layers.0.weight",
    ],
)
def test_other_parts_are_not_read(stored: str) -> None:
    assert not text_part(Gemma3Config()).has(stored)
