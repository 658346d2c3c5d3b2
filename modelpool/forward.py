"""ForwardOutput: what a forward over a pack gives, whichever way it is computed.

Contract: hidden states are those that transformers gives as `hidden_states`, by their indices
there: 0 is the embedded tokens, i what the i-th layer gives, the last one is behind the final norm.
Where none are asked for, none are kept.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from modelpool.attention.kv_view import AttentionLayer, KVView

HiddenLayers = tuple[int, ...]  # rising indices of hidden states


@dataclass(frozen=True, slots=True, eq=False)
class ForwardOutput:
    logits: Tensor  # [n, vocab_size] of the wanted tokens, in the model's dtype
    hidden: Tensor | None = (
        None  # [T, layers, hidden_size] of all tokens; None: none were asked for
    )


class Forward(Protocol):
    """See `PackedModel.forward`."""

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
    """The same, of tensors on the host or the device; `sizes`: see `PackedModel`."""

    @property
    def sizes(self) -> tuple[int, ...]: ...

    def prepare(
        self,
        arena: Callable[[AttentionLayer], tuple[Tensor, Tensor]],
        block_slots: int,
        hidden: HiddenLayers,
        /,
    ) -> None:
        """Whatever makes passes over this memory faster, which nobody has written to."""


def spans(hidden: HiddenLayers, layers: int) -> Iterator[tuple[int, int]]:
    """First and last plus one of the layers up to each hidden state, and of those after them."""
    return zip((0, *hidden), (*hidden, layers), strict=True)


def stacked(
    states: Sequence[Tensor], hidden: HiddenLayers, layers: int, norm: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """[T, layers asked for, hidden_size] of what the layers of each span give, [T, hidden_size]."""
    if not hidden:
        return None
    *others, last = states[: len(hidden)]
    return torch.stack((*others, norm(last) if hidden[-1] == layers else last), dim=1)
