"""Recurrent layers: the states that they keep for a row, and their arithmetic.

Contract: a recurrent layer keeps a state for each row instead of keys and values for each token.
Its kind defines how a token reads the state, and what of the token is needed to repeat its update:
the token's entry. A token's bits are a function of the text before it, in any pass that computes
it: every call of a kind is about one token of one row. A layer may keep states of several kinds,
such as those of a convolution and of the recurrence after it.

Not here: where states are stored, and when entries are applied (`statemgr`); the layers themselves
(`modelpool.mixers`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

Tensors = Sequence[Tensor]
StateKey = tuple[int, str]  # a layer's index in the model, and the name of a kind


@dataclass(frozen=True)
class StatePart:
    """A tensor that a layer keeps for a row; `dtype` is None for the model's."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


class RecurrentKind(ABC):
    """The state and the arithmetic of layers of one kind, without their weights.

    Attributes:
        name: includes the arithmetic's version: two kinds of one name have equal bits.
    """

    name: str
    parts: Sequence[StatePart]

    @abstractmethod
    def read(self, state: Tensors, token: Tensors) -> tuple[Tensor, Tensors]:
        """Return a token's output after `state`, and its entry; change neither `state` nor token.

        `token`: what `KVView.scan` was given of it.
        """

    @abstractmethod
    def advance(self, state: Tensors, entry: Tensors) -> None:
        """Add a token to `state`, in place."""

    def scan(self, state: Tensors, tokens: Tensors) -> Tensor:
        """Return outputs [n, ...] of consecutive tokens [n, ...]; add all of them to `state`.

        The bits are those of `read` and `advance`, token by token.
        """
        outputs = []
        for token in zip(*tokens, strict=True):
            output, entry = self.read(state, token)
            self.advance(state, entry)
            outputs.append(output)
        return torch.stack(outputs)


@dataclass(frozen=True)
class RecurrentLayer:
    """Place and kind of one state of a recurrent layer; `dtype` is that of its tokens."""

    device: torch.device
    dtype: torch.dtype
    kind: RecurrentKind

    def empty(self) -> list[Tensor]:
        """Return the state before a text."""
        return [
            torch.zeros(one.shape, dtype=one.dtype or self.dtype, device=self.device)
            for one in self.kind.parts
        ]

    def row_bytes(self, dtype: torch.dtype | None = None) -> int:
        """Return the bytes that it keeps for a row, for a model in `dtype`; None: in its own."""
        own = dtype or self.dtype
        return sum(prod(one.shape) * (one.dtype or own).itemsize for one in self.kind.parts)
