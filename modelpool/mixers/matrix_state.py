"""Kinds whose state is a matrix S [K, V] of each head, in float32 for any dtype of the model.

A token multiplies S by its decay d and adds the product of a key and a value to it. Every token
goes through this recurrence, including those of prompts: the chunked forms of transformers give
bits that depend on where a pass begins.

On a CPU the C library computes it, if there is one, in a third of the time. It sums in another
order than torch, so the two have different names.
"""

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from modelpool.kernels.recurrence import matrix_kernels
from modelpool.recurrent import RecurrentKind, StatePart, Tensors


class _Asked(NamedTuple):
    """Tokens as `MatrixKernels.scan` takes them, [n, heads, ...] each."""

    key: Tensor
    query: Tensor
    value: Tensor
    decay: Tensor
    rate: Tensor | None
    overlap: Tensor


class _MatrixState(RecurrentKind):
    """Kind with a matrix as its state.

    An entry is a token's key [heads, K], what is added [heads, V], and its decay [heads, 1].
    """

    rule: str

    def __init__(self, heads: int, key_dim: int, value_dim: int, device: torch.device) -> None:
        self.parts = (StatePart((heads, key_dim, value_dim), torch.float32),)
        self._kernels = matrix_kernels() if device.type == "cpu" else None
        self.name = f"{self.rule}-1" if self._kernels is None else f"{self.rule}-c1"

    def read(self, state: Tensors, token: Tensors) -> tuple[Tensor, Tensors]:
        if self._kernels is None:
            return self._read(state[0], token)
        asked = self._asked([part.unsqueeze(0) for part in token])
        out, added = self._kernels.scan(state[0], *asked, keeps=True)
        return out[0], (asked.key[0], added[0], asked.decay[0])

    def advance(self, state: Tensors, entry: Tensors) -> None:
        key, added, decay = entry
        if self._kernels is not None:
            self._kernels.advance(state[0], key, added, decay)
        else:
            state[0].mul_(decay.unsqueeze(-1)).addcmul_(key.unsqueeze(-1), added.unsqueeze(1))

    def scan(self, state: Tensors, tokens: Tensors) -> Tensor:
        if self._kernels is None:
            return super().scan(state, tokens)
        return self._kernels.scan(state[0], *self._asked(tokens))[0]

    @abstractmethod
    def _read(self, state: Tensor, token: Tensors) -> tuple[Tensor, Tensors]:
        """Compute `read` in torch."""

    @abstractmethod
    def _asked(self, tokens: Tensors) -> _Asked:
        """Return the kernels' inputs for tokens [n, ...]."""


class DeltaRule(_MatrixState):
    """Recurrence of Gated DeltaNet.

    With the rate b: u = b (v - d k S), o = d q S + (q k) u, S = d S + k u^T.

    A token is its key and query [heads, 2, K], value [heads, V], and decay, rate and product of
    query and key, [heads, 1] each.
    """

    rule = "delta-rule"

    def _read(self, state: Tensor, token: Tensors) -> tuple[Tensor, Tensors]:
        asking, value, decay, rate, overlap = token
        known, asked = torch.bmm(asking, state).unbind(1)
        added = (value - decay * known) * rate
        return decay * asked + overlap * added, (asking[:, 0], added, decay)

    def _asked(self, tokens: Tensors) -> _Asked:
        asking, value, decay, rate, overlap = tokens
        return _Asked(asking[:, :, 0], asking[:, :, 1], value, decay, rate, overlap)


class StateSpace(_MatrixState):
    """Recurrence of Mamba-2: o = d q S + (q k) u, S = d S + k u^T.

    A token is its query (C) [heads, 1, K], key (B) [heads, K], u [heads, V], and decay and product
    of query and key, [heads, 1] each.
    """

    rule = "state-space"

    def _read(self, state: Tensor, token: Tensors) -> tuple[Tensor, Tensors]:
        query, key, added, decay, overlap = token
        asked = torch.bmm(query, state).squeeze(1)
        return decay * asked + overlap * added, (key, added, decay)

    def _asked(self, tokens: Tensors) -> _Asked:
        query, key, added, decay, overlap = tokens
        return _Asked(key, query.squeeze(2), added, decay, None, overlap)
