"""Mamba-2 over packs: Granite 4 H, Bamba, Nemotron-H, and Falcon-H1, which attends beside it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modelpool.attention.kv_view import KVView
from modelpool.mixers.convolution import convolve, rms, silu, softplus
from modelpool.mixers.matrix_state import StateSpace


def project(module: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    """Return gates [T, inner], inputs of the convolution [T, channels], and steps [T, heads]."""
    if hasattr(module, "mup_vector"):  # Falcon-H1
        joined = module.in_proj(hidden * module.ssm_in_multiplier) * module.mup_vector
    else:
        joined = module.in_proj(hidden)
    sizes = [module.intermediate_size, module.conv_dim, module.num_heads]
    return torch.split(joined[0], sizes, -1)


def mix(module: Any, view: KVView, projected: Sequence[Tensor]) -> Tensor:
    """Compute `Arithmetic.mix`, like `Mamba2Mixer` of transformers and similar classes."""
    gate, mixed, step = projected
    convolved = silu(convolve(view, module.layer_idx, mixed, module.conv1d)).float()
    keys = module.n_groups * module.ssm_state_size
    x, key, query = torch.split(convolved, [module.intermediate_size, keys, keys], -1)
    x = x.reshape(len(x), -1, module.head_dim)  # [T, heads, V]
    kind = StateSpace(module.num_heads, module.ssm_state_size, module.head_dim, x.device)
    out = view.scan(module.layer_idx, kind, _tokens(module, x, key, query, step))
    return _gated(module.norm, (out + module.D.unsqueeze(-1) * x).flatten(1), gate)


def _tokens(module: Any, x: Tensor, key: Tensor, query: Tensor, step: Tensor) -> tuple[Tensor, ...]:
    """Return the inputs of `StateSpace`, in float32.

    Heads of values share groups of keys and queries.
    """
    groups = (len(x), module.n_groups, module.ssm_state_size)
    shared = module.num_heads // module.n_groups
    key, query = (each.reshape(groups).repeat_interleave(shared, 1) for each in (key, query))
    steps = softplus(step + module.dt_bias.to(step.dtype))
    steps = steps.clamp(*module.time_step_limit).float().unsqueeze(-1)  # [T, heads, 1]
    decay = torch.exp(-torch.exp(module.A_log.float()).unsqueeze(-1) * steps)
    return query.unsqueeze(2), key, steps * x, decay, (query * key).sum(-1, keepdim=True)


def _gated(norm: nn.Module, x: Tensor, gate: Tensor) -> Tensor:
    """Normalise [T, n] by groups and multiply by SiLU of the gate, in the order of the class."""
    if isinstance(norm, nn.Identity):
        return x * silu(gate)
    given: Any = norm
    is_normed_first = getattr(norm, "norm_before_gate", False)
    opened = silu(gate.float())
    x = x.float() if is_normed_first else (x * opened).float()
    size = getattr(norm, "group_size", 0) or x.shape[-1] // getattr(norm, "n_groups", 1)
    grouped = rms(x.reshape(len(x), -1, size), given.variance_epsilon)
    normed: Tensor = given.weight * grouped.flatten(1)
    return normed * opened if is_normed_first else normed
