"""Which models are decoders of Llama's shape, that may be run without their modules.

Contract: architectures are an allow-list, and whatever differs from the shape in the least is
refused: hooks, weights that are spread or that transformers quantises, partial or length-dependent
rotation, other activations.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from modelpool.checkpoint.architecture import max_positions
from modelpool.fast.lean_norm import LeanRMSNorm
from modelpool.fast.linear import PackedLinear, is_hooked
from modelpool.fast.quantised import QuantisedLinear

_CLASSES = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})  # known not to look at lengths
_MAX_TABLE = 2**18  # positions whose rotations are kept
_LAYER_PARTS = frozenset({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORMS = frozenset({"q_norm", "k_norm"})
_MLP_PARTS = frozenset({"gate_proj", "up_proj", "down_proj", "act_fn"})


def is_llama_shaped(model: PreTrainedModel) -> bool:
    """Whether the short ways through a decoder know this model."""
    kind = type(model)
    if kind.__name__ not in _CLASSES or not kind.__module__.startswith("transformers.models."):
        return False
    core: Any = model.model
    config: Any = model.config
    rotary = core.rotary_emb
    return (
        config.hidden_act == "silu"
        and getattr(model, "hf_quantizer", None) is None
        and rotary.rope_type in _ROPE_TYPES
        and max_positions(config) <= _MAX_TABLE
        and 2 * rotary.inv_freq.numel() == core.layers[0].self_attn.head_dim
        and len(core.layers) == config.num_hidden_layers
        and type(core.embed_tokens) is nn.Embedding
        and core.embed_tokens.max_norm is None
        and _is_norm(core.norm)
        and _is_linear(model.lm_head)
        and all(_is_known_layer(layer, number) for number, layer in enumerate(core.layers))
        and not any(_is_hooked(module) for module in model.modules())
        and len({(p.device, p.dtype) for p in model.parameters()}) == 1
    )


def _is_known_layer(layer: Any, number: int) -> bool:
    if _parts(layer) != _LAYER_PARTS or _parts(layer.mlp) != _MLP_PARTS:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    norms = _parts(attention) - set(_PROJECTIONS)
    linears: list[Any] = [getattr(attention, name, None) for name in _PROJECTIONS]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    fused = (linears[:3], linears[4:6])
    return (
        norms in (frozenset(), _NORMS)
        and all(_is_norm(getattr(attention, name)) for name in norms)
        and _is_norm(layer.input_layernorm)
        and _is_norm(layer.post_attention_layernorm)
        and all(_is_linear(linear) for linear in linears)
        # Biased together or not at all.
        and all(len({part.bias is None for part in parts}) == 1 for parts in fused)
        and attention.layer_idx == number
        and (not norms or norm_eps(attention.q_norm) == norm_eps(attention.k_norm))
    )


def _parts(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, _ in module.named_children())


def _is_norm(module: Any) -> bool:
    own = type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")
    return type(module) is LeanRMSNorm or own


def _is_linear(module: Any) -> bool:
    return type(module) in (nn.Linear, PackedLinear, QuantisedLinear)


def _is_hooked(module: nn.Module) -> bool:
    """Or has another `forward` in its place, as `accelerate` does it, too."""
    return is_hooked(module) or "forward" in vars(module)


def attention_window(attention: Any, config: Any) -> int | None:
    """What the layer passes to its attention; `check` compares."""
    if config.model_type == "mistral":  # in all layers, and said nowhere else
        return getattr(config, "sliding_window", None)
    return getattr(attention, "sliding_window", None)


def norm_eps(norm: Any) -> float:
    return float(norm.eps if type(norm) is LeanRMSNorm else norm.variance_epsilon)


def rotations(rotary: Any, like: Tensor, positions: int) -> Tensor:
    """[positions, 2, 1, head_dim] cosines and sines, these with the signs of `rotate_half`."""
    index = torch.arange(positions, device=like.device).unsqueeze(0)
    cos, sin = rotary(like, index)  # [1, positions, head_dim], scaled as the model wants it
    sin[..., : sin.shape[-1] // 2].neg_()
    return torch.stack((cos[0], sin[0]), dim=1).unsqueeze(2)
