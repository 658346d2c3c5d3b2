"""Recurrent layers as papers define them: token by token, in float64, in a plain loop.

transformers computes them in two forms, of which neither gives the other's bits. A reference has
its layers with these recurrences in the place of both.
"""

import functools
import sys
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """[B, T, heads, dim] each, g and beta [B, T, heads] -> [B, T, heads, V], [B, heads, K, V].

    Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks", eq. 10, of normed queries and keys.
    """
    shared = value.shape[2] // key.shape[2]
    q, k = (each.double().repeat_interleave(shared, 2) for each in (query, key))
    q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    v, decay, rate = value.double(), g.double().exp(), beta.double()
    empty = v.new_zeros(len(v), v.shape[2], k.shape[3], v.shape[3])
    state, outputs = empty if initial_state is None else initial_state.double(), []
    for t in range(v.shape[1]):
        state = state * decay[:, t, :, None, None]
        known = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        change = rate[:, t, :, None] * (v[:, t] - known)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], change)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * q.shape[3] ** -0.5)
    return torch.stack(outputs, 1).to(query.dtype), state


_RECURRENCES = {
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "torch_recurrent_gated_delta_rule": gated_delta_rule,
}


def by_recurrence(model: PreTrainedModel) -> PreTrainedModel:
    """The same, whose recurrent layers go token by token."""
    module, forward = sys.modules[type(model).__module__], model.forward
    replaced: dict[str, Any] = {
        name: ours for name, ours in _RECURRENCES.items() if hasattr(module, name)
    }

    @functools.wraps(forward)
    def replacing(*given: Any, **named: Any) -> Any:
        with mock.patch.multiple(cast(Any, module), **replaced):
            return forward(*given, **named)

    if replaced:
        vars(model)["forward"] = replacing
    return model
