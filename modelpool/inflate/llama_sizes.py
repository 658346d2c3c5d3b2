"""LlamaShape: the sizes of a Llama checkpoint, and those that it can be inflated to."""

import math
from dataclasses import dataclass, replace
from typing import Any

_REAL_HIDDEN = 640  # the narrowest hidden state of a real model


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """The sizes of a Llama checkpoint that inflation changes, and those that it keeps."""

    hidden: int
    layers: int
    mlp: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool

    @property
    def parameter_count(self) -> int:
        attention = 2 * self.hidden * (self.query_heads + self.kv_heads) * self.head_dim
        layer = attention + 3 * self.hidden * self.mlp + 2 * self.hidden
        embeddings = (1 if self.tied else 2) * self.vocab_size * self.hidden
        return embeddings + self.layers * layer + self.hidden


@dataclass(frozen=True)
class Growth:
    """Sizes that a checkpoint is inflated to.

    Attributes:
        width_exponent: k; the hidden state becomes 4^k times as wide, with as many times more
            heads.
        layers, mlp: their new number, at least the source's.
    """

    width_exponent: int
    layers: int
    mlp: int

    def of(self, old: LlamaShape) -> LlamaShape:
        factor = 4**self.width_exponent
        return replace(
            old,
            hidden=old.hidden * factor,
            layers=self.layers,
            mlp=self.mlp,
            query_heads=old.query_heads * factor,
            kv_heads=old.kv_heads * factor,
        )


def realistic_growth(old: LlamaShape, min_parameters: int) -> Growth:
    """Return the growth to a realistic shape of at least `min_parameters`.

    It is as wide as the narrowest real models, with heads in proportion, an MLP four times as wide
    as the hidden state, and as many layers as needed.
    """
    width_exponent = 0
    while old.hidden * 4**width_exponent < _REAL_HIDDEN:
        width_exponent += 1
    bare = Growth(width_exponent, 0, max(4 * old.hidden * 4**width_exponent, old.mlp))
    fixed = bare.of(old).parameter_count
    per_layer = replace(bare, layers=1).of(old).parameter_count - fixed
    layers = max(old.layers, math.ceil((min_parameters - fixed) / per_layer))
    return replace(bare, layers=layers)


def shape_of(config: dict[str, Any]) -> LlamaShape:
    """Return the sizes in a checkpoint's `config.json`."""
    heads = config["num_attention_heads"]
    return LlamaShape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        mlp=config["intermediate_size"],
        query_heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
    )
