"""Kinds whose state is a matrix S [K, V] of each head, in float32 whatever the model's dtype.

A token fades S by its decay d and adds the product of a key and a value to it. Every token goes
through this recurrence, those of prompts too: transformers' forms of chunks give other bits by
where a pass begins.
"""

import torch
from torch import Tensor

from modelpool.recurrent import RecurrentKind, StatePart, Tensors


class _MatrixState(RecurrentKind):
    """An entry is a token's key [heads, K], what is added [heads, V], and its decay [heads, 1]."""

    def __init__(self, heads: int, key_dim: int, value_dim: int) -> None:
        self.parts = (StatePart((heads, key_dim, value_dim), torch.float32),)

    def advance(self, state: Tensors, entry: Tensors) -> None:
        key, added, decay = entry
        state[0].mul_(decay.unsqueeze(-1)).addcmul_(key.unsqueeze(-1), added.unsqueeze(1))


class DeltaRule(_MatrixState):
    """Of Gated DeltaNet, with the rate b: u = b (v - d k S), o = d q S + (q k) u, S = d S + k u^T.

    A token is its key and query [heads, 2, K], value [heads, V], and decay, rate and product of
    query and key, [heads, 1] each.
    """

    name = "delta-rule-1"

    def read(self, state: Tensors, token: Tensors) -> tuple[Tensor, Tensors]:
        asking, value, decay, rate, overlap = token
        known, asked = torch.bmm(asking, state[0]).unbind(1)
        added = (value - decay * known) * rate
        return decay * asked + overlap * added, (asking[:, 0], added, decay)


class StateSpace(_MatrixState):
    """Of Mamba-2: o = d q S + (q k) u, S = d S + k u^T.

    A token is its query (C) [heads, 1, K], key (B) [heads, K], u [heads, V], and decay and product
    of query and key, [heads, 1] each.
    """

    name = "state-space-1"

    def read(self, state: Tensors, token: Tensors) -> tuple[Tensor, Tensors]:
        query, key, added, decay, overlap = token
        asked = torch.bmm(query, state[0]).squeeze(1)
        return decay * asked + overlap * added, (key, added, decay)
