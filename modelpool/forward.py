"""ForwardOutput: the result of a forward over a pack, for every way to compute it.

Contract: hidden states have the indices that they have in `hidden_states` of transformers: 0 is the
embedded tokens, i the output of the i-th layer, and the last one follows the final norm. If none
are asked for, none are kept.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from modelpool.attention.kv_view import AttentionLayer, KVView

HiddenLayers = tuple[int, ...]  # increasing indices of hidden states


@dataclass(frozen=True, slots=True, eq=False)
class ForwardOutput:
    logits: Tensor  # [n, vocab_size] of the wanted tokens, in the model's dtype
    hidden: Tensor | None = (
        None  # [T, layers, hidden_size] of all tokens; None if none were asked for
    )


class Forward(Protocol):
    """Signature of `PackedModel.forward`."""

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        view: KVView,
        logit_index: Tensor,
        hidden: HiddenLayers = (),
        /,
    ) -> ForwardOutput: ...


class SizedForward(Forward, Protocol):
    """Forward for tensors on the host or the device; for `sizes` see `PackedModel`."""

    @property
    def sizes(self) -> tuple[int, ...]: ...

    def prepare(
        self,
        arena: Callable[[AttentionLayer], tuple[Tensor, Tensor]],
        block_slots: int,
        hidden: HiddenLayers,
        /,
    ) -> None:
        """Prepare faster passes over this memory, to which nothing has been written yet."""


def spans(hidden: HiddenLayers, layers: int) -> Iterator[tuple[int, int]]:
    """Return the first layer, and the last plus one, up to each hidden state and after the last."""
    return zip((0, *hidden), (*hidden, layers), strict=True)


def stacked(
    states: Sequence[Tensor], hidden: HiddenLayers, layers: int, norm: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """Stack the states after each span, [T, hidden_size] each, to [T, layers, hidden_size].

    None if no hidden states are asked for; `norm` is applied to the last layer's.
    """
    if not hidden:
        return None
    *others, last = states[: len(hidden)]
    return torch.stack((*others, norm(last) if hidden[-1] == layers else last), dim=1)
