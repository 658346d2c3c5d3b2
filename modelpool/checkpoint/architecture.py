"""Checks of whether the attention plug-in supports a model, from the model's configuration.

Pure functions of a configuration, and a check of the class that would be loaded; they read no
weights.
"""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from modelpool.mixers.registry import recurrent_types

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Types of layers in which a token reads no other token, by model type.
_TOKENWISE = {"nemotron_h": frozenset({"mlp", "moe"})}
# Types whose frequencies depend on the largest position of the whole pack, so on other rows.
_PACK_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def expert_count(config: Any) -> int | None:
    """Return the number of experts in each mixture of a model.

    None if the model has none, or if the number differs between layers.
    """
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    found = next((one for name in names if (one := getattr(config, name, None))), None)
    return found if isinstance(found, int) and found > 1 else None


def chooses(layer: str, outputs: int, experts: int | None) -> bool:
    """Return whether a linear layer of this name is a router or a gate with one output.

    Its error matters more than the memory of its few outputs.
    """
    return outputs in (1, experts) and not layer.endswith("_proj")


def refusal(config: Any) -> str | None:
    """Return the reason why a model of this configuration cannot be served, or None.

    The parity probe may still refuse a model that passes, when it is loaded.
    """
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model; only decoders are supported"
    served = _LAYER_TYPES | recurrent_types(config)
    family = getattr(config, "model_type", "")
    served |= _TOKENWISE.get(family, frozenset())
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in served:
            return f"layer {layer} is of type {kind}, which is not served for {family!r} models"
    if getattr(config, "auto_map", None):
        return None  # the repository's own code, which is known only when it is loaded
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return f"{type(config).__name__} has no causal language model in transformers"
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    text = config.get_text_config(decoder=True)
    if text is not config and model_class.config_class is type(text):  # weights have other names
        return f"it is a composite, of which {model_class.__name__} is not served alone"
    return _class_refusal(model_class)


def _class_refusal(model_class: Any) -> str | None:
    if not model_class._can_set_attn_implementation():
        return undispatched(model_class)
    if "logits_to_keep" not in inspect.signature(model_class.forward).parameters:
        return f"{model_class.__name__} takes no logits_to_keep"
    return None


def undispatched(model_class: type) -> str:
    return f"{model_class.__name__} does not dispatch its attention (AttentionInterface)"


def max_positions(config: Any) -> int:
    """Return the longest sequence whose logits do not depend on its neighbours in a pack."""
    limit = int(getattr(config, "max_position_embeddings", None) or 2**31)
    for rope in _rope_parameters(config):
        both = (rope.get("short_factor"), rope.get("long_factor"))
        is_one = both[0] is not None and both[0] == both[1]  # longrope, one set of factors
        if rope.get("rope_type") in _PACK_DEPENDENT_ROPE and not is_one:
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limit = min(limit, int(original or limit))
    return limit


def ignored_window(config: Any, seen: Mapping[int, int | None]) -> str | None:
    """Return the reason why a layer's sliding window would not be honoured, or None.

    Some models apply it only in their mask, which packed attention does not build; others pass on a
    window that their mask ignores. Either would be noticed only in contexts longer than it.

    Args:
        config: configuration of the model.
        seen: the window that the model passed to its attention, by layer.
    """
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None) or None
    longest = max_positions(text)
    for layer, passed in sorted(seen.items()):
        wanted = window if kinds is None or kinds[layer] == "sliding_attention" else None
        if min(wanted or longest, longest) != min(passed or longest, longest):
            return f"the attention of layer {layer} is given a window of {passed}, not of {wanted}"
    return None


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """Yield all rotary settings of a model; some models have one set per layer type."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in found.values() if isinstance(value, dict)]
    yield from nested or [found]
