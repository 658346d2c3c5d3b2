"""Gated DeltaNet over packs: Qwen3-Next, Qwen3.5 and 3.6.

Each head has a state S [K, V], in float32 whatever the model's dtype. A token with the decay d and
the rate b reads and updates it as transformers' recurrent form does:

    u = b * (v - d * k S)
    o = d * q S + (q k) u
    S = d * S + k u^T

Every token goes through this recurrence, those of prompts too: transformers' form of chunks gives
other bits by where a pass begins.
"""

from typing import Any

import torch
from torch import Tensor

from modelpool.attention.kv_view import KVView
from modelpool.mixers.convolution import convolve, rms, sigmoid, silu, softplus
from modelpool.recurrent import RecurrentKind, StatePart, Tensors

_NORM_EPS = 1e-6  # of keys and queries, beside the sum of their squares


class DeltaRule(RecurrentKind):
    """The kind: S `[heads, key_dim, value_dim]`; an entry is a token's key, u and decay.

    A token is its key and query [heads, 2, K], value [heads, V], and decay, rate and product of
    query and key, [heads, 1] each. A product of the two rows is summed otherwise than one of a
    single row, so they always are together.
    """

    name = "delta-rule-1"

    def __init__(self, heads: int, key_dim: int, value_dim: int) -> None:
        self.parts = (StatePart((heads, key_dim, value_dim), torch.float32),)

    def read(self, state: Tensors, token: Tensors) -> tuple[Tensor, Tensors]:
        asking, value, decay, rate, overlap = token
        key, query = torch.bmm(asking, state[0]).unbind(1)
        added = (value - decay * key) * rate
        return decay * query + overlap * added, (asking[:, 0], added, decay)

    def advance(self, state: Tensors, entry: Tensors) -> None:
        key, added, decay = entry
        state[0].mul_(decay.unsqueeze(-1)).addcmul_(key.unsqueeze(-1), added.unsqueeze(1))


def forward(module: Any, hidden_states: Tensor, packed_kv: Any, **_: Any) -> Tensor:
    """[1, T, hidden] of a pack to the same, in the place of a `GatedDeltaNet`'s own."""
    mixed, gate, rate, step = _projected(module, hidden_states)
    view: KVView = packed_kv.view
    mixed = silu(convolve(view, module.layer_idx, mixed, module.conv1d))
    tokens = _tokens(module, mixed.float(), rate, step)
    kind = DeltaRule(module.num_v_heads, module.head_k_dim, module.head_v_dim)
    out = view.scan(module.layer_idx, kind, tokens).to(hidden_states.dtype)  # [T, heads, V]
    out = gated_norm(module.norm, out, gate).flatten(1)
    projected: Tensor = module.out_proj(out)
    return projected.unsqueeze(0)


def _projected(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values [T, channels], gates [T, heads, V], rates and steps [T, heads]."""
    if hasattr(module, "in_proj_qkvz"):  # Qwen3-Next joins them
        joined = module.in_proj_qkvz(hidden), module.in_proj_ba(hidden)
        parts = module.fix_query_key_value_ordering(*joined)
        query, key, value, gate, rate, step = (each[0] for each in parts)
        return torch.cat([each.flatten(1) for each in (query, key, value)], 1), gate, rate, step
    gate = module.in_proj_z(hidden)[0].reshape(hidden.shape[1], -1, module.head_v_dim)
    mixed, rate, step = module.in_proj_qkv, module.in_proj_b, module.in_proj_a
    return mixed(hidden)[0], gate, rate(hidden)[0], step(hidden)[0]


def _tokens(module: Any, mixed: Tensor, rate: Tensor, step: Tensor) -> tuple[Tensor, ...]:
    """What `DeltaRule` reads of [T, channels] in float32. Heads of values share heads of keys."""
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


def gated_norm(norm: Any, x: Tensor, gate: Tensor) -> Tensor:
    """[..., n] normed, then multiplied by SiLU of the gate, as `RMSNormGated` of these models."""
    normed: Tensor = norm.weight * rms(x.float(), norm.variance_epsilon).to(x.dtype)
    return (normed * silu(gate.float())).to(x.dtype)
