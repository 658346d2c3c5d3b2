"""Weights in 4 bits as checkpoints have them: in blocks, whose scales are floats.

Contract: a weight is `nibble * scale * step - centre * base`, where scale and centre are small
integers of an output and `GROUP` inputs, and step and base are float16 of an output and a block.
Source: ggml-common.h of ggml (block_q4_0, block_q4_1, block_q4_K).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GROUP = 32  # inputs
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q4_K": 144}
_Bytes = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class BlockValues:
    """A weight.

    Attributes:
        nibbles: [out, in] uint8 from 0 to 15.
        steps, bases: [out, blocks] float16.
        scales, centres: [out, groups] uint8 up to 63. None: all are 1, and each group is a block.
    """

    nibbles: Tensor
    steps: Tensor
    bases: Tensor
    scales: Tensor | None = None
    centres: Tensor | None = None

    @classmethod
    def of(cls, kind: str, stored: _Bytes) -> "BlockValues":
        """Of rows' bytes, [out, bytes]. `kind`: of `BLOCK_BYTES`."""
        outputs = len(stored)
        blocks = stored.reshape(outputs, -1, BLOCK_BYTES[kind])
        steps, second = _halves(blocks, 0), _halves(blocks, 2)
        packed = blocks[..., 16:].reshape(outputs, -1, 32) if kind == "Q4_K" else blocks[..., -16:]
        pairs = np.stack((packed & 15, packed >> 4), axis=-2)  # first the lower of all these bytes
        nibbles = torch.from_numpy(pairs.reshape(outputs, -1))
        if kind == "Q4_K":
            scales, centres = (torch.from_numpy(one) for one in _of_groups(blocks[..., 4:16]))
            return cls(nibbles, steps, second, scales.flatten(1), centres.flatten(1))
        return cls(nibbles, steps, 8 * steps if kind == "Q4_0" else -second)

    @property
    def out_features(self) -> int:
        return len(self.nibbles)

    @property
    def groups_of_block(self) -> int:
        return self.nibbles.shape[1] // GROUP // self.steps.shape[1]

    def multiply(self, levels: Tensor) -> Tensor:
        """[T, in] whole numbers of activations to [T, out] float32, as the kernels do."""
        steps, bases = self.steps.float(), self.bases.float()
        if self.scales is not None and self.centres is not None:
            steps = steps.repeat_interleave(self.groups_of_block, 1) * self.scales
            bases = bases.repeat_interleave(self.groups_of_block, 1) * self.centres
        y = torch.zeros(len(levels), self.out_features)
        for group in range(steps.shape[1]):
            inputs = slice(group * GROUP, (group + 1) * GROUP)
            of_group = levels[:, inputs].float()
            sums = of_group @ self.nibbles[:, inputs].float().t()  # exact
            y += sums * steps[:, group] - of_group.sum(1, keepdim=True) * bases[:, group]
        return y


class StoredBlocks(ABC):
    """A weight in a file, or the weights of all experts."""

    @abstractmethod
    def read(self, expert: int = 0) -> "Sequence[BlockValues | None]":
        """Of those whose outputs stand side by side in one weight; None is not in blocks.

        Raises `OSError`, `ValueError`.
        """


def _halves(blocks: _Bytes, start: int) -> Tensor:
    """[out, blocks] the float16 that begins at a byte of each."""
    return torch.from_numpy(np.ascontiguousarray(blocks[..., start : start + 2])).view(
        torch.float16
    )[..., 0]


def _of_groups(packed: _Bytes) -> tuple[_Bytes, _Bytes]:
    """[out, blocks, 8] scales and centres, of 6 bits each in 12 bytes: those of the first four
    groups, and around them the upper bits of the others."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=-1)
    centres = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=-1)
    return scales, centres
