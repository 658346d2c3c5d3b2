"""Layers of a store, in one line."""

import torch

from modelpool.attention.kv_view import KVLayer


def kv_layer(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    dim: int,
    value_dim: int | None = None,
    is_latent: bool = False,
) -> KVLayer:
    """Of keys and values of one width, unless another is given for the values."""
    return KVLayer(
        device=device,
        dtype=dtype,
        kv_heads=heads,
        head_dim=dim,
        value_dim=dim if value_dim is None else value_dim,
        is_latent=is_latent,
    )
