"""InflatedTensors: the tensors of the larger model, one after the other."""

from collections.abc import Iterator

import torch
from torch import Tensor

from modelpool.inflate.llama_sizes import LlamaShape

_NOISE = 0.02  # spread of new weights, as in the initialisation of real models


class InflatedTensors:
    """Tensors of the larger model, for the same function: see `modelpool.inflate.inflate`."""

    def __init__(
        self,
        weights: dict[str, Tensor],
        old: LlamaShape,
        new: LlamaShape,
        width_exponent: int,
        generator: torch.Generator,
    ) -> None:
        self._weights, self._old, self._new = weights, old, new
        self._norm_scale = 2.0**-width_exponent
        self._generator = generator

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "model.embed_tokens.weight", self._padded(self._weights["model.embed_tokens.weight"])
        for layer in range(self._new.layers):
            yield from self._layer(f"model.layers.{layer}.", is_new=layer >= self._old.layers)
        yield "model.norm.weight", self._norm("model.norm.weight")
        if not self._new.tied:
            yield "lm_head.weight", self._widened(self._weights["lm_head.weight"])

    def _layer(self, prefix: str, is_new: bool) -> Iterator[tuple[str, Tensor]]:
        new, dim = self._new, self._new.head_dim
        query_rows = None if is_new else torch.arange(self._old.query_heads * dim)
        kv_rows = None if is_new else torch.arange(self._old.kv_heads * dim)
        mlp_rows = None if is_new else torch.arange(self._old.mlp)
        for name, rows, count in (
            ("self_attn.q_proj", query_rows, new.query_heads * dim),
            ("self_attn.k_proj", kv_rows, new.kv_heads * dim),
            ("self_attn.v_proj", kv_rows, new.kv_heads * dim),
            ("mlp.gate_proj", mlp_rows, new.mlp),
            ("mlp.up_proj", mlp_rows, new.mlp),
        ):
            yield f"{prefix}{name}.weight", self._into(f"{prefix}{name}.weight", rows, count)
        for name, columns, count in (
            ("self_attn.o_proj", query_rows, new.query_heads * dim),
            ("mlp.down_proj", mlp_rows, new.mlp),
        ):
            yield f"{prefix}{name}.weight", self._back(f"{prefix}{name}.weight", columns, count)
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            yield prefix + name, self._norm(prefix + name)

    def _into(self, name: str, rows: Tensor | None, count: int) -> Tensor:
        """Return a projection of the hidden state, [count, hidden]; new weights are random."""
        weight = self._random(count, self._new.hidden)
        if rows is not None:
            weight[rows, : self._old.hidden] = self._weights[name].to(weight.dtype)
        return weight

    def _back(self, name: str, columns: Tensor | None, count: int) -> Tensor:
        """Return a projection into the hidden state, [hidden, count]; new weights are zero."""
        weight = torch.zeros(self._new.hidden, count, dtype=self._dtype)
        if columns is not None:
            weight[: self._old.hidden, columns] = self._weights[name]
        return weight

    def _norm(self, name: str) -> Tensor:
        """Return the weights of a norm, [hidden]; those of the padding only scale zeros."""
        weight = torch.ones(self._new.hidden, dtype=self._dtype)
        if name in self._weights:
            weight[: self._old.hidden] = self._weights[name]
        return weight * self._norm_scale

    def _padded(self, weight: Tensor) -> Tensor:
        """Return the embedding, [V, hidden]; its padding must be zero."""
        padded = torch.zeros(weight.shape[0], self._new.hidden, dtype=self._dtype)
        padded[:, : self._old.hidden] = weight
        return padded

    def _widened(self, weight: Tensor) -> Tensor:
        """Return an untied output embedding, [V, hidden]; it is random where it reads zeros."""
        widened = self._random(weight.shape[0], self._new.hidden)
        widened[:, : self._old.hidden] = weight
        return widened

    def _random(self, *shape: int) -> Tensor:
        return (torch.randn(shape, generator=self._generator) * _NOISE).to(self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        return self._weights["model.embed_tokens.weight"].dtype
