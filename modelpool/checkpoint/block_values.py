"""Weights in blocks, as checkpoints have them: whole numbers of 4 to 8 bits, and a few scales.

Contract: a weight is `((number - zero) * scale * step - centre * base) * unit`, where scale and
centre are small integers of an output and `GROUP` inputs (or half as many: two scales a group),
step and base are float16 of an output and a block, and unit is one float of an output. What is
None counts one; with neither bases nor centres nothing is taken. Source: ggml-common.h of ggml.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

GROUP = 32  # inputs
BLOCK_BYTES = {
    "Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176,
    "Q6_K": 210, "IQ4_NL": 18, "IQ4_XS": 136, "MXFP4": 17,
}  # fmt: skip
BYTES_ZERO = 128  # of numbers of 8 bits
_LEVELS = 127  # of either sign, of weights that are rounded to 8 bits
_OF_4_BITS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # IQ4
_MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_MXFP4_BIAS = 128
_MOST_STEP = 256.0  # of an output: smaller ones keep their digits in float16
_TINY = 1e-30
_Bytes = NDArray[Any]  # uint8


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockValues:
    """A weight.

    Attributes:
        numbers: [out, in] uint8, of 4, 5, 6 or 8 `bits`; of 6 with two scales a group.
        steps, bases: [out, blocks] float16.
        scales: [out, groups] or [out, 2 * groups] int8.
        centres: [out, groups] uint8.
        units: [out] float32.
    """

    numbers: Tensor
    bits: int
    zero: int = 0
    steps: Tensor | None = None
    bases: Tensor | None = None
    scales: Tensor | None = None
    centres: Tensor | None = None
    units: Tensor | None = None

    @classmethod
    def of(cls, kind: str, stored: _Bytes) -> "BlockValues | None":
        """Of rows' bytes, [out, bytes]. `kind`: of `BLOCK_BYTES`. None: a scale is too large or too
        small for float16."""
        return _READERS[kind](stored.reshape(len(stored), -1, BLOCK_BYTES[kind]))

    @classmethod
    def rounded(cls, weight: Tensor) -> "BlockValues":
        """The nearest to `weight` [out, in] in 8 bits, with one step for each group."""
        outputs, inputs = weight.shape
        plain = F.pad(weight.detach().float(), (0, -inputs % GROUP)).view(outputs, -1, GROUP)
        largest = plain.abs().amax(dim=2) / _LEVELS
        units = (largest.amax(dim=1) / _MOST_STEP).clamp_(min=_TINY)
        steps = (largest / units[:, None]).half()
        width = steps.float().clamp(min=_TINY).mul_(units[:, None]).unsqueeze(2)
        levels = (plain / width).round_().clamp_(-_LEVELS, _LEVELS)
        numbers = levels.add_(BYTES_ZERO).to(torch.uint8).flatten(1)[:, :inputs]
        return cls(numbers=numbers, bits=8, zero=BYTES_ZERO, steps=steps, units=units)

    @property
    def out_features(self) -> int:
        return len(self.numbers)

    @property
    def groups_of_block(self) -> int:
        """Groups that share a step and a base."""
        groups = -(-self.numbers.shape[1] // GROUP)
        return 1 if self.steps is None else groups // self.steps.shape[1]

    @property
    def parts(self) -> int:
        """Scales of a group."""
        groups = -(-self.numbers.shape[1] // GROUP)
        return 1 if self.scales is None else self.scales.shape[1] // groups

    def plain(self) -> Tensor:
        """[out, in] float32."""
        (outputs, inputs), size = self.numbers.shape, GROUP // self.parts
        levels = self.numbers.float().sub_(self.zero)
        if inputs % GROUP:
            levels = F.pad(levels, (0, -inputs % GROUP))
        levels = levels.view(outputs, -1, self.parts, size)
        steps, bases = self._of_group(self.steps), self._of_group(self.bases)
        if self.scales is not None:
            steps = steps * self.scales.view(outputs, -1, self.parts, 1)
        if self.centres is not None:
            bases = bases * self.centres.view(outputs, -1, 1, 1)
        levels = levels.mul_(steps)
        if self.bases is not None or self.centres is not None:
            levels = levels.sub_(bases)
        levels = levels.flatten(1)[:, :inputs]
        return levels if self.units is None else levels.mul_(self.units.unsqueeze(1))

    def _of_group(self, halves: Tensor | None) -> Tensor:
        """[out, groups, 1, 1] float32."""
        if halves is None:
            return torch.ones(self.out_features, 1, 1, 1)
        return halves.float().repeat_interleave(self.groups_of_block, 1)[:, :, None, None]

    def relative_error(self, weight: Tensor) -> float:
        """See `Int8Values.relative_error`."""
        plain = weight.detach().float()
        changed = torch.linalg.vector_norm(self.plain() - plain)
        return float(changed / torch.linalg.vector_norm(plain).clamp(min=_TINY))


class StoredBlocks(ABC):
    """A weight in a file, or the weights of all experts."""

    @abstractmethod
    def read(self, expert: int = 0) -> "Sequence[BlockValues | None]":
        """Of those whose outputs stand side by side in one weight; None is not in blocks.

        Raises `OSError`, `ValueError`.
        """

    @abstractmethod
    def plain(self, expert: int = 0) -> Sequence[Tensor]:
        """All of them as plain numbers, [out, in] each. Raises as `read`."""


def _of_32(blocks: _Bytes, start: int) -> Tensor:
    """[out, in] the 4 bits from a byte of each block on: first the lower of 16 bytes."""
    return _flat(_nibbles(blocks[..., start : start + 16]))


def _q4_0(blocks: _Bytes) -> BlockValues:
    return BlockValues(numbers=_of_32(blocks, 2), bits=4, zero=8, steps=_halves(blocks, 0))


def _q4_1(blocks: _Bytes) -> BlockValues:
    steps, bases = _halves(blocks, 0), -_halves(blocks, 2)
    return BlockValues(numbers=_of_32(blocks, 4), bits=4, steps=steps, bases=bases)


def _fifths(blocks: _Bytes, start: int) -> _Bytes:
    """[out, blocks, 32] the fifth bits of 32 numbers, in their place."""
    return np.unpackbits(blocks[..., start : start + 4], axis=-1, bitorder="little") << 4


def _q5_0(blocks: _Bytes) -> BlockValues:
    numbers = _flat(_nibbles(blocks[..., 6:]) | _fifths(blocks, 2))
    return BlockValues(numbers=numbers, bits=5, zero=16, steps=_halves(blocks, 0))


def _q5_1(blocks: _Bytes) -> BlockValues:
    numbers = _flat(_nibbles(blocks[..., 8:]) | _fifths(blocks, 4))
    steps, bases = _halves(blocks, 0), -_halves(blocks, 2)
    return BlockValues(numbers=numbers, bits=5, steps=steps, bases=bases)


def _q8_0(blocks: _Bytes) -> BlockValues:
    numbers, steps = _flat(blocks[..., 2:] ^ 128), _halves(blocks, 0)
    return BlockValues(numbers=numbers, bits=8, zero=BYTES_ZERO, steps=steps)


def _of_256(blocks: _Bytes, numbers: _Bytes, bits: int) -> BlockValues:
    """Types with scales and centres of 6 bits, from the fifth byte on."""
    scales, centres = (torch.from_numpy(one).flatten(1) for one in _of_groups(blocks[..., 4:16]))
    steps, bases = _halves(blocks, 0), _halves(blocks, 2)
    return BlockValues(
        numbers=_flat(numbers), bits=bits, steps=steps, bases=bases, scales=scales.to(torch.int8),
        centres=centres,
    )  # fmt: skip


def _q4_k(blocks: _Bytes) -> BlockValues:
    return _of_256(blocks, _nibbles(blocks[..., 16:], 32), 4)


def _q5_k(blocks: _Bytes) -> BlockValues:
    high = blocks[..., 16:48, None] >> np.arange(8, dtype=np.uint8) & 1  # one bit of each group
    fifths = high.swapaxes(-1, -2).reshape(*blocks.shape[:2], 256) << 4
    return _of_256(blocks, _nibbles(blocks[..., 48:], 32) | fifths, 5)


def _q6_k(blocks: _Bytes) -> BlockValues:
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 1, 64)
    shifts = np.array([0, 4], np.uint8).reshape(1, 1, 1, 2, 1)
    low = (low >> shifts & 15).reshape(*blocks.shape[:2], 2, 4, 32)
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    high = high >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 1, 4, 1) & 3
    scales = torch.from_numpy(np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)).flatten(1)
    steps = _halves(blocks, 208)
    return BlockValues(numbers=_flat(low | high << 4), bits=6, zero=32, steps=steps, scales=scales)


def _from_table(places: _Bytes, table: Sequence[int]) -> Tensor:
    return _flat((np.array(table) + BYTES_ZERO).astype(np.uint8)[places])


def _iq4_nl(blocks: _Bytes) -> BlockValues:
    numbers = _from_table(_nibbles(blocks[..., 2:]), _OF_4_BITS)
    return BlockValues(numbers=numbers, bits=8, zero=BYTES_ZERO, steps=_halves(blocks, 0))


def _iq4_xs(blocks: _Bytes) -> BlockValues:
    shifts = np.arange(0, 16, 2, dtype=np.uint16)
    high = np.ascontiguousarray(blocks[..., 2:4]).view(np.uint16) >> shifts & 3
    low = blocks[..., 4:8, None] >> np.array([0, 4], np.uint8) & 15
    scales = low.reshape(*blocks.shape[:2], 8) | high.astype(np.uint8) << 4
    numbers = _from_table(_nibbles(blocks[..., 8:], 16), _OF_4_BITS)
    signed = torch.from_numpy(scales).to(torch.int8).flatten(1) - 32
    steps = _halves(blocks, 0)
    return BlockValues(numbers=numbers, bits=8, zero=BYTES_ZERO, steps=steps, scales=signed)


def _mxfp4(blocks: _Bytes) -> BlockValues | None:
    powers = torch.from_numpy(blocks[..., 0].astype(np.int32)) - _MXFP4_BIAS
    steps = torch.ldexp(torch.ones_like(powers, dtype=torch.float32), powers)
    if not torch.equal(steps.half().float(), steps):
        return None
    numbers = _from_table(_nibbles(blocks[..., 1:]), _MXFP4)
    return BlockValues(numbers=numbers, bits=8, zero=BYTES_ZERO, steps=steps.half())


_READERS: Mapping[str, Callable[[_Bytes], BlockValues | None]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k,
    "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
}  # fmt: skip


def _halves(blocks: _Bytes, start: int) -> Tensor:
    """[out, blocks] the float16 that begins at a byte of each."""
    return torch.from_numpy(np.ascontiguousarray(blocks[..., start : start + 2])).view(
        torch.float16
    )[..., 0]


def _nibbles(packed: _Bytes, of: int = 16) -> _Bytes:
    """[out, blocks, n] to [out, blocks, 2n]: of each `of` bytes first the lower four bits."""
    parts = packed.reshape(*packed.shape[:2], -1, of)
    return np.stack((parts & 15, parts >> 4), axis=-2).reshape(*packed.shape[:2], -1)


def _flat(numbers: _Bytes) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers.reshape(len(numbers), -1)))


def _of_groups(packed: _Bytes) -> tuple[_Bytes, _Bytes]:
    """[out, blocks, 8] scales and centres, of 6 bits each in 12 bytes: those of the first four
    groups, and around them the upper bits of the others."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=-1)
    centres = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=-1)
    return scales, centres
