"""Gated DeltaNet over packs: Qwen3-Next, Qwen3.5 and 3.6."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from modelpool.attention.kv_view import KVView
from modelpool.mixers.convolution import convolve, rms, sigmoid, silu, softplus
from modelpool.mixers.matrix_state import DeltaRule

_NORM_EPS = 1e-6  # for keys and queries, added to the sum of their squares


def project(module: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    """Return queries, keys, values [T, channels], gates [T, heads, V], rates, steps [T, heads]."""
    if hasattr(module, "in_proj_qkvz"):  # Qwen3-Next joins them
        joined = module.in_proj_qkvz(hidden), module.in_proj_ba(hidden)
        parts = module.fix_query_key_value_ordering(*joined)
        query, key, value, gate, rate, step = (each[0] for each in parts)
        return torch.cat([each.flatten(1) for each in (query, key, value)], 1), gate, rate, step
    gate = module.in_proj_z(hidden)[0].reshape(hidden.shape[1], -1, module.head_v_dim)
    mixed, rate, step = module.in_proj_qkv, module.in_proj_b, module.in_proj_a
    return mixed(hidden)[0], gate, rate(hidden)[0], step(hidden)[0]


def mix(module: Any, view: KVView, projected: Sequence[Tensor]) -> Tensor:
    """Compute `Arithmetic.mix`, like `GatedDeltaNet` of transformers."""
    mixed, gate, rate, step = projected
    convolved = silu(convolve(view, module.layer_idx, mixed, module.conv1d))
    kind = DeltaRule(module.num_v_heads, module.head_k_dim, module.head_v_dim, mixed.device)
    out = view.scan(module.layer_idx, kind, _tokens(module, convolved.float(), rate, step))
    return _gated(module.norm, out.to(gate.dtype), gate).flatten(1)


def _tokens(module: Any, mixed: Tensor, rate: Tensor, step: Tensor) -> tuple[Tensor, ...]:
    """Return the inputs of `DeltaRule`, from [T, channels] in float32.

    Heads of values share heads of keys.
    """
    parts = [module.key_dim, module.key_dim, module.value_dim]
    query, key, value = torch.split(mixed, parts, -1)
    heads = (len(mixed), -1, module.head_k_dim)
    query, key = (_normed(each.reshape(heads)) for each in (query, key))
    query = query * module.head_k_dim**-0.5
    shared = module.num_v_heads // module.num_k_heads
    query, key = (each.repeat_interleave(shared, 1) for each in (query, key))
    steps = softplus(step.float() + module.dt_bias)
    decay = torch.exp((-torch.exp(module.A_log.float()) * steps).float())
    return (
        torch.stack((key, query), 2),
        value.reshape(len(mixed), -1, module.head_v_dim),
        decay.unsqueeze(-1),
        sigmoid(rate).float().unsqueeze(-1),
        (query * key).sum(-1, keepdim=True),
    )


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _NORM_EPS)


def _gated(norm: Any, x: Tensor, gate: Tensor) -> Tensor:
    """Normalise [..., n], then multiply by SiLU of the gate, as `RMSNormGated` of these models."""
    normed: Tensor = norm.weight * rms(x.float(), norm.variance_epsilon).to(x.dtype)
    return (normed * silu(gate.float())).to(x.dtype)
