"""Recurrent layers: the arithmetic of what they keep of a row, and the mixers that are served.

Contract: a recurrent layer keeps a state of each row instead of keys and values of each token. Its
kind says how a token reads the state, and what of the token is needed to repeat its update: the
token's entry. A token's bits are a function of the text before it, whatever pass it is computed in:
every call of a kind is about one token of one row. A layer may keep states of several kinds, such
as those of a convolution and of what follows it.

Not here: where states live, and when entries are applied (`statemgr`); the layers themselves
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
    """A tensor that a layer keeps of a row. `dtype`: None: the model's."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


class RecurrentKind(ABC):
    """What layers of one kind keep of a row, and their arithmetic. It holds no weights.

    Attributes:
        name: with the arithmetic's version: two of one name have equal bits.
    """

    name: str
    parts: Sequence[StatePart]

    @abstractmethod
    def read(self, state: Tensors, token: Tensors) -> tuple[Tensor, Tensors]:
        """A token's output after `state`, and its entry. Changes neither.

        `token`: what `KVView.scan` was given of it.
        """

    @abstractmethod
    def advance(self, state: Tensors, entry: Tensors) -> None:
        """Puts a token behind `state`, in place."""

    def scan(self, state: Tensors, tokens: Tensors) -> Tensor:
        """Outputs [n, ...] of tokens [n, ...] that follow one another, behind the last of which
        `state` is put. With the bits of `read` and `advance`, token by token."""
        outputs = []
        for token in zip(*tokens, strict=True):
            output, entry = self.read(state, token)
            self.advance(state, entry)
            outputs.append(output)
        return torch.stack(outputs)


@dataclass(frozen=True)
class RecurrentLayer:
    """Place and kind of one state of a recurrent layer. `dtype`: of what its tokens come in."""

    device: torch.device
    dtype: torch.dtype
    kind: RecurrentKind

    def empty(self) -> list[Tensor]:
        """The state before a text."""
        return [
            torch.zeros(one.shape, dtype=one.dtype or self.dtype, device=self.device)
            for one in self.kind.parts
        ]

    def row_bytes(self, dtype: torch.dtype | None = None) -> int:
        """That it keeps of a row, of a model in `dtype`; None: in its own."""
        own = dtype or self.dtype
        return sum(prod(one.shape) * (one.dtype or own).itemsize for one in self.kind.parts)
