"""Cosines and sines with the same bits on every CPU.

Contract: everything is computed in float64, by additions and multiplications alone, which IEEE 754
defines to the bit, and is rounded once. torch uses a math library, which has other bits on other
CPUs. Angles are reduced by pi/2 in three parts of 33 bits, as in fdlibm: exact up to 2**20 quarter
turns, which are 1.6 million positions. Taylor's series end below 1e-16.
"""

import math

import torch
from torch import Tensor

_HALF_PI = (1.57079632673412561417, 6.07710050630396597660e-11, 2.02226624871116645580e-21)
_SINE = tuple((-1) ** n / math.factorial(2 * n + 1) for n in range(9))
_COSINE = tuple((-1) ** n / math.factorial(2 * n) for n in range(9))
_AT_ONCE = 2**15  # numbers, so that intermediate results stay in the CPU's cache


def cosine(angles: Tensor) -> Tensor:
    """Return the cosines of angles in radians, float32 or float64, of any shape."""
    return _by_parts(angles, 1)


def sine(angles: Tensor) -> Tensor:
    """Return the sines of angles in radians, float32 or float64, of any shape."""
    return _by_parts(angles, 0)


def _by_parts(angles: Tensor, quarters: int) -> Tensor:
    """Return the sines of angles that are advanced by `quarters` quarter turns."""
    found = torch.empty_like(angles, memory_format=torch.contiguous_format)
    flat, to = angles.flatten(), found.view(-1)
    for start in range(0, len(flat), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        to[part] = _sines(flat[part].double(), quarters)
    return found


def _sines(angles: Tensor, quarters: int) -> Tensor:
    turned = torch.round(angles * (2 / math.pi))
    rest = angles
    for part in _HALF_PI:
        rest = rest - turned * part
    square = rest * rest
    quadrant = (turned.long() + quarters) % 4
    found = torch.where(quadrant % 2 == 0, _series(_SINE, square) * rest, _series(_COSINE, square))
    return torch.where(quadrant < 2, found, -found)


def _series(factors: tuple[float, ...], square: Tensor) -> Tensor:
    found = torch.full_like(square, factors[-1])
    for factor in reversed(factors[:-1]):
        found.mul_(square).add_(factor)
    return found
