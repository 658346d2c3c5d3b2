"""Recurrent layers as papers define them: token by token, in float64, in a plain loop.

transformers computes them in two forms, of which neither gives the other's bits. A reference has
its layers with these recurrences in the place of both.
"""

import functools
import sys
from typing import Any, cast
from unittest import mock

import torch
import torch.nn.functional as F
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


def state_space(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    **_: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """x [B, T, heads, P], dt [B, T, heads], a, D, dt_bias [heads], b and c [B, T, groups, N] ->
    [B, T, heads, P], [B, heads, P, N].

    Dao and Gu 2024, "Transformers are SSMs", section 2.
    """
    shared = x.shape[2] // b.shape[2]
    b, c = (each.double().repeat_interleave(shared, 2) for each in (b, c))
    x, dt = x.double(), F.softplus(dt.double() + dt_bias.double()).clamp(*dt_limit)
    empty = x.new_zeros(len(x), *x.shape[2:], b.shape[3])
    state, outputs = empty if initial_states is None else initial_states.double(), []
    for t in range(x.shape[1]):
        step = dt[:, t, :, None, None]
        added = torch.einsum("bhp,bhn->bhpn", x[:, t], b[:, t])
        state = torch.exp(a.double()[:, None, None] * step) * state + step * added
        read = torch.einsum("bhpn,bhn->bhp", state, c[:, t])
        outputs.append(read + D.double()[:, None] * x[:, t])
    out = torch.stack(outputs, 1)
    return (out, state) if return_final_states else out


def state_space_step(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    *,
    z: Tensor | None,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    **_: Any,
) -> Tensor:
    """One token behind `state`, in place; what has a dimension of P or N beside is repeated."""
    out, new = state_space(
        x[:, None],
        dt[:, None, :, 0],
        a[:, 0, 0],
        b[:, None],
        c[:, None],
        D=d[:, 0],
        dt_bias=dt_bias[:, 0],
        dt_limit=dt_limit,
        initial_states=state,
        return_final_states=True,
    )
    state.copy_(new)
    return out[:, 0] if z is None else out[:, 0] * F.silu(z)


_RECURRENCES: dict[str, Any] = {
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "torch_recurrent_gated_delta_rule": gated_delta_rule,
    "mamba2_chunk_scan": state_space,
    "mamba2_selective_state_update": state_space_step,
}


def by_recurrence(model: PreTrainedModel) -> PreTrainedModel:
    """The same, whose recurrent layers go token by token."""
    module, forward = sys.modules[type(model).__module__], model.forward
    replaced = {name: ours for name, ours in _RECURRENCES.items() if hasattr(module, name)}
    modules: list[Any] = list(model.modules())
    limits = {one.time_step_limit for one in modules if hasattr(one, "time_step_limit")}
    if "mamba2_chunk_scan" in replaced and limits:  # which transformers forgets after the prompt
        name, [limit] = "mamba2_selective_state_update", limits
        replaced[name] = functools.partial(state_space_step, dt_limit=limit)

    @functools.wraps(forward)
    def replacing(*given: Any, **named: Any) -> Any:
        with mock.patch.multiple(cast(Any, module), **replaced):
            return forward(*given, **named)

    if replaced:
        vars(model)["forward"] = replacing
    return model
