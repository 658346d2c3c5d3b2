"""Weights in blocks, as checkpoints have them: integers of 4 to 8 bits, and a few scales.

Contract: a weight is `((number - zero) * scale * step - centre * base) * unit`, where scale and
centre are small integers of an output and `GROUP` inputs (or half as many: two scales a group),
step and base are float16 of an output and a block, and unit is one float of an output. A part that
is None counts as one; with neither bases nor centres nothing is subtracted. Source: ggml-common.h
of ggml.
"""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

GROUP = 32  # inputs
BYTES_ZERO = 128  # zero of 8-bit numbers
_LEVELS = 127  # levels of either sign, for weights that are rounded to 8 bits
_MOST_STEP = 256.0  # largest step of an output: smaller steps keep their digits in float16
_TINY = 1e-30
_Bytes = NDArray[Any]  # uint8


class _Form(NamedTuple):
    """Layout of a type: how many bytes, bases and so on a block of `size` inputs has."""

    bytes: int
    size: int
    bits: int
    zero: int = 0
    bases: int = 0
    scales: int = 0
    centres: int = 0


_FORMS: Mapping[str, _Form] = {  # in the order of blocks.c
    "Q4_0": _Form(18, 32, 4, 8),
    "Q4_1": _Form(20, 32, 4, bases=1),
    "Q5_0": _Form(22, 32, 5, 16),
    "Q5_1": _Form(24, 32, 5, bases=1),
    "Q8_0": _Form(34, 32, 8, BYTES_ZERO),
    "Q4_K": _Form(144, 256, 4, bases=1, scales=8, centres=8),
    "Q5_K": _Form(176, 256, 5, bases=1, scales=8, centres=8),
    "Q6_K": _Form(210, 256, 6, 32, scales=16),
    "IQ4_NL": _Form(18, 32, 8, BYTES_ZERO),
    "IQ4_XS": _Form(136, 256, 8, BYTES_ZERO, scales=8),
    "MXFP4": _Form(17, 32, 8, BYTES_ZERO),
}
BLOCK_BYTES = {name: form.bytes for name, form in _FORMS.items()}


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockValues:
    """A weight in blocks.

    Attributes:
        numbers: [out, in] uint8, of 4, 5, 6 or 8 `bits`; 6 bits have two scales a group.
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
    def of(cls, kind: str, stored: _Bytes, library: ctypes.CDLL) -> "BlockValues | None":
        """Return the weight in stored bytes; None if a scale is too large or small for float16.

        Args:
            kind: a key of `BLOCK_BYTES`.
            stored: the bytes of the rows, [out, bytes].
            library: the C library.
        """
        form, stored = _FORMS[kind], np.ascontiguousarray(stored)
        outputs, blocks = len(stored), stored.shape[1] // form.bytes

        def made(of_block: int, dtype: torch.dtype) -> Tensor | None:
            return torch.empty(outputs, blocks * of_block, dtype=dtype) if of_block else None

        found = cls(
            numbers=torch.empty(outputs, blocks * form.size, dtype=torch.uint8),
            bits=form.bits,
            zero=form.zero,
            steps=made(1, torch.float16),
            bases=made(form.bases, torch.float16),
            scales=made(form.scales, torch.int8),
            centres=made(form.centres, torch.uint8),
        )
        parts = (found.numbers, found.steps, found.bases, found.scales, found.centres)
        places = [None if one is None else one.data_ptr() for one in parts]
        number, count = list(_FORMS).index(kind), outputs * blocks
        failed = library.sr_unblock(
            number, form.bytes, form.size, stored.ctypes.data, count, *places
        )
        return None if failed else found

    @classmethod
    def rounded(cls, weight: Tensor) -> "BlockValues":
        """Return `weight` [out, in] rounded to 8 bits, with one step for each group."""
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
        """Number of groups that share a step and a base."""
        groups = -(-self.numbers.shape[1] // GROUP)
        return 1 if self.steps is None else groups // self.steps.shape[1]

    @property
    def parts(self) -> int:
        """Number of scales of a group."""
        groups = -(-self.numbers.shape[1] // GROUP)
        return 1 if self.scales is None else self.scales.shape[1] // groups

    def plain(self) -> Tensor:
        """Return the weight in float32, [out, in]."""
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
        """Return values of blocks for each group, [out, groups, 1, 1] float32."""
        if halves is None:
            return torch.ones(self.out_features, 1, 1, 1)
        return halves.float().repeat_interleave(self.groups_of_block, 1)[:, :, None, None]

    def relative_error(self, weight: Tensor) -> float:
        """Return the relative error of this weight; see `Int8Values.relative_error`."""
        plain = weight.detach().float()
        changed = torch.linalg.vector_norm(self.plain() - plain)
        return float(changed / torch.linalg.vector_norm(plain).clamp(min=_TINY))


class StoredBlocks(ABC):
    """A weight in a file, or the weights of all experts."""

    @abstractmethod
    def read(self, expert: int = 0) -> "Sequence[BlockValues | None]":
        """Return the weights whose outputs are side by side in one weight.

        An entry is None if it is not in blocks, or if no library can read it. Raises `OSError`,
        `ValueError`.
        """

    @abstractmethod
    def plain(self, expert: int = 0) -> Sequence[Tensor]:
        """Return all of them as plain numbers, [out, in] each; raise the errors of `read`."""
