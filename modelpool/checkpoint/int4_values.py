"""Weights that are rounded to 4 bits.

Contract: a level is `nibble * scale - centre`, where scale and centre are small integers of an
output and `GROUP` inputs, and fits int8; a weight is its level times one float of the output.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from modelpool.checkpoint.block_values import GROUP, BlockValues
from modelpool.checkpoint.int8_values import INT8_LEVELS

_NIBBLES = 15  # the largest nibble
_MOST_SCALE = 17  # 15 * 17 is the largest byte
_MOST_LEVEL = 120  # level of the largest weight, so that rounding stays within int8
_TINY = 1e-30  # least unit, which keeps an output of zeros at zero
_ROWS = 256  # outputs that are quantised at once, which limits the memory


def in_4_bits(weight: Tensor) -> BlockValues:
    """Return `weight` [out, in] in 4 bits.

    Each group has the scale of the least squared error, and its range is centred.
    """
    parts = [_quantised(each.float()) for each in torch.split(weight.detach(), _ROWS)]
    numbers, scales, centres, units = (torch.cat(each) for each in zip(*parts, strict=True))
    return BlockValues(
        numbers=numbers, bits=4, scales=scales.to(torch.int8), centres=centres, units=units
    )


def _quantised(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return nibbles, scales, centres and units of [out, in] float32."""
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
