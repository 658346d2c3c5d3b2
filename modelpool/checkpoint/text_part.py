"""TextPart: the served part of a checkpoint: all of it, or the text model of a composite.

Contract: a pure function of a configuration. Composites (text beside images or sound) are an
allow-list: only the text model is loaded, by a causal class of `transformers`, and its weights are
found under their names in the composite. The other parts are never read. Llama 4 is served within
its first chunk, where all its attention is ordinary.
"""

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from transformers import Qwen2Config, Qwen3Config

_T = TypeVar("_T")

# By the composite's model type: the configuration of a causal class that computes the same for
# text, if the text part has no such class of its own. Rotary positions in three dimensions are
# ordinary ones if all three are equal, as they are for text.
_COMPOSITES: Mapping[str, type[Any] | None] = {
    "gemma3": None,
    "gemma3n": None,
    "gemma4": None,
    "llama4": None,
    "mistral3": None,
    "qwen2_vl": Qwen2Config,
    "qwen2_5_vl": Qwen2Config,
    "qwen3_vl": Qwen3Config,
    "qwen3_5": None,
    "qwen3_5_moe": None,
}
_MULTIMODAL_ROPE = ("mrope_section", "mrope_interleaved")
_RENAMED: Mapping[str, str] = {
    r"^language_model\.lm_head\.": "lm_head.",
    r"^(model\.)?language_model\.(model\.)?": "model.",
}
_OTHER_PARTS = re.compile(
    r"(^|\.)(vision_tower|vision_model|visual|multi_modal_projector|audio_tower"
    r"|embed_vision|embed_audio|vision_embedder|mtp)\."
)


@dataclass(frozen=True)
class TextPart:
    """The served part of a checkpoint.

    Attributes:
        config: configuration of the causal class that is loaded; not the checkpoint's own if
            `is_changed`.
        renamed: patterns of the checkpoint's names, and their replacements in the class's names.
    """

    config: Any
    is_composite: bool = False
    is_changed: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Return whether a weight of the checkpoint belongs to the text model."""
        return not self.is_composite or _OTHER_PARTS.search(name) is None

    def rename(self, name: str) -> str:
        """Return the name of a weight in the text model."""
        for pattern, replacement in self.renamed.items():
            name = re.sub(pattern, replacement, name)
        return name

    def layers(self, stored: Mapping[str, _T]) -> dict[str, _T]:
        """Return items that are stored by layer, by the layers' names in the text model."""
        dotted = {f"{layer}.": one for layer, one in stored.items()}  # patterns end with a dot
        return {self.rename(name)[:-1]: one for name, one in dotted.items() if self.has(name)}


def text_part(config: Any) -> TextPart:
    """Return the part of a model of this configuration that is served."""
    text = config.get_text_config(decoder=True)
    if config.model_type not in _COMPOSITES or text is config:
        first = _first_chunk(config)
        return TextPart(first, is_changed=first is not config)
    kind = _COMPOSITES[config.model_type]
    text = copy.deepcopy(text) if kind is None else _as(kind, text)
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", text.tie_word_embeddings)
    for declared in ("dtype", "quantization_config", "compression_config"):
        if getattr(text, declared, None) is None and getattr(config, declared, None) is not None:
            setattr(text, declared, getattr(config, declared))
    return TextPart(_first_chunk(text), is_composite=True, is_changed=True, renamed=_RENAMED)


def _first_chunk(config: Any) -> Any:
    """Return the configuration of a Llama 4 within its first chunk; others unchanged.

    It ends where a second chunk or the tuning of the temperature begins: that depends on the place
    in a pass, and not on the position. Up to there it computes the same.
    """
    if config.model_type != "llama4_text":
        return config
    first = copy.deepcopy(config)
    ends = [first.max_position_embeddings]
    if "chunked_attention" in first.layer_types:
        ends.append(first.attention_chunk_size)
    if first.attn_temperature_tuning:
        ends.append(int(first.floor_scale) - 1)
    first.max_position_embeddings = min(ends)
    first.layer_types = ["full_attention"] * first.num_hidden_layers
    first.attn_temperature_tuning = False
    return first


def _as(kind: type[Any], text: Any) -> Any:
    """Return the configuration of a text model in another class that has all its settings."""
    settings = {key: value for key, value in text.to_dict().items() if key != "model_type"}
    rope = dict(settings.get("rope_parameters") or {})
    for key in _MULTIMODAL_ROPE:
        rope.pop(key, None)
    if rope.get("rope_type") == "mrope":
        rope["rope_type"] = "default"
    return kind(**settings | {"rope_parameters": rope})
