"""Multi-head latent attention (MLA) that stores latents instead of keys and values of heads.

Contract: a module of this kind in transformers computes the keys and values of all heads from one
latent and one rotated key (`expand_kv`). Here these two are the only key, which all heads read, and
the latent is also the value: the weight of `kv_b_proj` is applied to the queries and to the outputs
of attention instead. The function is the same, but its sums have another order. It takes a tenth of
the memory or less. Source: DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.2.
"""

from typing import Any

import torch
from torch import Tensor, nn

_SIZES = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")


class LatentHeads(nn.Module):
    """Replacement for `kv_b_proj` that keeps its weight and is never applied to tokens."""

    def __init__(self, plain: nn.Linear, key_dim: int, value_dim: int) -> None:
        """Replace `plain`; `key_dim` is the width of a head's key without the rotated part."""
        super().__init__()
        self.weight = plain.weight
        self._key_dim, self._width = key_dim, key_dim + value_dim

    def of_latents(self, query: Tensor) -> Tensor:
        """Map queries [heads, T, key_dim + rotated] of heads to [.., rank + rotated] of latents."""
        plain, rotated = query[..., : self._key_dim], query[..., self._key_dim :]
        return torch.cat((plain @ self._of_heads[:, : self._key_dim], rotated), dim=-1)

    def of_heads(self, read: Tensor) -> Tensor:
        """Map attention outputs [T, heads, rank] of latents to [T, heads, value_dim] of heads."""
        values = self._of_heads[:, self._key_dim :].transpose(1, 2)
        return (read.transpose(0, 1) @ values).transpose(0, 1)

    @property
    def _of_heads(self) -> Tensor:
        """Weight as [heads, key_dim + value_dim, rank]."""
        return self.weight.view(-1, self._width, self.weight.shape[1])


def use_latents(model: nn.Module) -> None:
    """Make every layer of this kind store latents."""
    for module in model.modules():
        found: Any = module
        plain = latent_weight(module)
        if plain is not None:
            found.kv_b_proj = LatentHeads(plain, found.qk_nope_head_dim, found.v_head_dim)
            found.expand_kv = _kept


def latent_weight(module: nn.Module) -> nn.Linear | None:
    """Return the layer's projection that `LatentHeads` replaces, or None; it must stay plain."""
    plain = getattr(module, "kv_b_proj", None)
    is_known = isinstance(plain, nn.Linear) and plain.bias is None and _expands(module)
    return plain if is_known else None


def latent_heads(module: nn.Module) -> LatentHeads | None:
    """Return the `LatentHeads` of a layer that stores latents, or None."""
    found = getattr(module, "kv_b_proj", None)
    return found if isinstance(found, LatentHeads) else None


def _expands(module: Any) -> bool:
    return hasattr(module, "expand_kv") and all(hasattr(module, size) for size in _SIZES)


def _kept(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Return a key and a value of [1, 1, T, rank] and [1, 1, T, rotated]; replaces `expand_kv`.

    The value is the first part of the key and shares its memory.
    """
    key = torch.cat((latent, rotated), dim=-1)
    return key, key[..., : latent.shape[-1]]
