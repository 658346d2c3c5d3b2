"""Weights in 4 bits, as a compressed form of weights in int8.

Contract: a level is `nibble * scale - centre`, where scale and centre are small integers of an
output and `GROUP` inputs, and fits int8; a weight is its level times one float of the output. So a
sum of products with levels is exact in int32 however it is computed, and int8 kernels give the bits
that 4-bit kernels give: `expanded` has the same levels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from modelpool.checkpoint.int8_values import INT8_LEVELS, Int8Values

GROUP = 32  # inputs that share a scale and a centre
_NIBBLES = 15  # the largest
_MOST_SCALE = 17  # 15 * 17 is the largest byte
_MOST_LEVEL = 120  # of the largest weight, so that rounding stays within int8
_TINY = 1e-30  # the least unit: an output of zeros stays one
_ROWS = 256  # outputs that are quantised at once, which bounds the memory that it takes


@dataclass(frozen=True, eq=False)
class Int4Values:
    """A quantised weight.

    Attributes:
        nibbles: [out, in] uint8 from 0 to 15.
        scales, centres: [out, groups] uint8, from 1 to 17 and from 0 to 255; the last group may be
            cut short.
        units: [out] float32, a level's worth.
    """

    nibbles: Tensor
    scales: Tensor
    centres: Tensor
    units: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> "Int4Values":
        """Of `weight` [out, in]: of all scales the one with the least squared error in its group,
        the range of the group centred."""
        parts = [_quantised(each.float()) for each in torch.split(weight.detach(), _ROWS)]
        return cls(*(torch.cat(each) for each in zip(*parts, strict=True)))

    @property
    def in_features(self) -> int:
        return self.nibbles.shape[1]

    @property
    def out_features(self) -> int:
        return len(self.nibbles)

    def expanded(self) -> Int8Values:
        """The same weight in int8."""
        inputs = self.in_features
        scales = self.scales.repeat_interleave(GROUP, dim=1)[:, :inputs].to(torch.int16)
        centres = self.centres.repeat_interleave(GROUP, dim=1)[:, :inputs].to(torch.int16)
        levels = self.nibbles.to(torch.int16).mul_(scales).sub_(centres)
        return Int8Values(levels.to(torch.int8), self.units)

    def relative_error(self, weight: Tensor) -> float:
        """See `Int8Values.relative_error`."""
        return self.expanded().relative_error(weight)


def _quantised(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Nibbles, scales, centres and units of [out, in] float32."""
    outputs, inputs = weight.shape
    grouped = F.pad(weight, (0, -inputs % GROUP)).view(outputs, -1, GROUP)
    units = weight.abs().amax(dim=1).div_(_MOST_LEVEL).clamp_(min=_TINY)
    wanted = grouped / units[:, None, None]
    middle = (wanted.amax(dim=2) + wanted.amin(dim=2)) / 2
    least = torch.full_like(middle, torch.inf)
    scales, centres = torch.ones_like(middle), torch.zeros_like(middle)
    for scale in range(1, _MOST_SCALE + 1):
        centre = (_NIBBLES / 2 * scale - middle).round_().clamp_(0, 255)
        levels = _nibbles(wanted, scale, centre).mul_(scale).sub_(centre.unsqueeze(2))
        error = (levels - wanted).square_().sum(dim=2)
        outside = (levels.amax(dim=2) > INT8_LEVELS) | (levels.amin(dim=2) < -INT8_LEVELS - 1)
        better = (error < least) & ~outside
        least = torch.where(better, error, least)
        scales = torch.where(better, scale, scales)
        centres = torch.where(better, centre, centres)
    nibbles = _nibbles(wanted, scales.unsqueeze(2), centres).flatten(1)[:, :inputs]
    return (*(each.to(torch.uint8) for each in (nibbles, scales, centres)), units)  # type: ignore[return-value]


def _nibbles(wanted: Tensor, scale: Tensor | int, centre: Tensor) -> Tensor:
    return ((wanted + centre.unsqueeze(2)) / scale).round_().clamp_(0, _NIBBLES)
