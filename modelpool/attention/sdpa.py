"""Attention by torch's `scaled_dot_product_attention`, on any device, over masks."""

import torch
from torch import Tensor
from torch.nn import functional as F

from modelpool.attention.packed import Attend, AttentionLayer, KVView


def sdpa() -> Attend:
    return attend_all


def attend_all(view: KVView, layer: AttentionLayer, query: Tensor) -> Tensor:
    """Attention of a whole pack by SDPA: [heads, T, head_dim] to [T, heads, head_dim].

    Group by group of B rows with Q queries each. The query heads of a key/value group are folded
    into the query axis: no copies of keys and values, and larger matrix products.
    """
    parts = []
    for group in view.groups:
        picked = query if group.take is None else query.index_select(1, group.take[query.device])
        keys, values = view.read(layer.number, group)
        rows, kv_heads, _, _ = keys.shape
        heads, _, dim = query.shape
        repeat, queries = heads // kv_heads, group.queries
        is_single = rows == queries == 1  # a token alone, which is decoded most often
        if is_single:
            folded = picked.reshape(1, kv_heads, repeat, dim)
        else:
            folded = (
                picked.reshape(kv_heads, repeat, rows, queries, dim)
                .permute(2, 0, 1, 3, 4)
                .reshape(rows, kv_heads, repeat * queries, dim)
            )
        mask = view.mask(group, repeat, layer.window, query.dtype, query.device)
        if layer.softcap is None:
            out = F.scaled_dot_product_attention(
                folded, keys, values, attn_mask=mask, scale=layer.scale
            )
        else:
            out = _softcapped(folded, keys, values, mask, layer)
        if is_single:
            out = out.reshape(1, heads, -1)
        else:
            out = (
                out.reshape(rows, kv_heads, repeat, queries, -1)
                .permute(0, 3, 1, 2, 4)
                .reshape(rows * queries, heads, -1)
            )
        parts.append(out if group.put is None else out.index_select(0, group.put[out.device]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _softcapped(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, layer: AttentionLayer
) -> Tensor:
    """Gemma 2's attention: scores are squashed by `softcap * tanh(score / softcap)`."""
    assert layer.softcap is not None
    softcap = layer.softcap
    scores = softcap * torch.tanh(query @ keys.transpose(-1, -2) * layer.scale / softcap) + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(query.dtype, torch.float32))
    return weights.to(query.dtype) @ values
