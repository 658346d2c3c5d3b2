"""What the target and its twin in int8 have in common is in memory once.

Contract: linear layers are the twin's own. What is left of its weights, embeddings before all, is
the target's tensor where that is the same to the bit and on the same device. Neither may write to
it; inference does not. Memory is accounted as if nothing were shared.
"""

import torch
from torch import nn


def share_weights(twin: nn.Module, target: nn.Module) -> int:
    """Lets parameters of `twin` be those of `target`; the bytes that this spares."""
    known = dict(target.named_parameters())
    spared = 0
    for name, own in twin.named_parameters():
        other = known.get(name)
        if other is not None and _are_equal(own, other):
            own.data = other.data
            spared += own.nbytes
    return spared


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)
    return alike and one.data_ptr() != other.data_ptr() and torch.equal(one, other)
