"""Weights that the target and its twin share in memory.

Contract: the twin has its own linear layers. Its other weights, mainly embeddings, are the target's
tensors if they are equal to the bit and on the same device. Neither model may write to them;
inference does not. Memory is accounted as if nothing were shared.
"""

import torch
from torch import nn


def share_weights(twin: nn.Module, target: nn.Module) -> int:
    """Make equal parameters of `twin` those of `target`; return the bytes that this saves."""
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
