"""The order in which oneDNN sums a packed product, found by trial.

Contract: a row's bits depend on the order in which its products are summed, which oneDNN chooses by
the sizes of a product, its rows and the threads. Trials use sums of pairs that cancel out: the
remainder is rounding error, which changes with the smallest change of the order. Sums of random
numbers hide most changes once they are rounded to bfloat16. Each trial is made once in a process.
"""

from functools import cache

import torch
from torch import Tensor

_ROWS_HINT = 16  # oneDNN chooses the layout for this many rows; it works for any number
_COUNTS = (1, 2, 3, 4, 5, 8, 15, 16, 17, 24, 32)  # numbers of rows that are tried
_LEAST = (1, 2, 4, 8, 16)  # possible results of `least_rows`
_KINDS = 64  # different weight rows in a trial, which are repeated


def pack(weight: Tensor) -> Tensor:
    """Return a weight [out, in] in oneDNN's layout."""
    with torch.no_grad():
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT)
    return packed


def product(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """Map [..., in] to [..., out], as oneDNN sums it."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y


def cancelling(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows [rows, inputs] and a weight [outputs, inputs] whose products sum to zero."""
    chance, half = torch.Generator().manual_seed(0), inputs // 2
    other = torch.randperm(half, generator=chance)
    weight = torch.randn(min(outputs, _KINDS), half, generator=chance)
    x = torch.randn(rows, half, generator=chance)
    rest = inputs - 2 * half
    weight = torch.cat((weight, weight[:, other], weight.new_zeros(len(weight), rest)), dim=1)
    x = torch.cat((x, -x[:, other], x.new_zeros(rows, rest)), dim=1)
    repeated = weight.to(dtype).repeat(-(-outputs // len(weight)), 1)[:outputs]
    return x.to(dtype), repeated.contiguous()


@cache
def least_rows(inputs: int, outputs: int, dtype: torch.dtype, threads: int) -> int:
    """Return the number of rows from which on each row is summed in one order.

    `threads` is the number that torch is set to now.
    """
    x, weight = cancelling(max(_COUNTS), inputs, outputs, dtype)
    with torch.inference_mode():
        packed = pack(weight)
        together = product(x, packed)
        others = [n for n in _COUNTS if not torch.equal(product(x[:n], packed), together[:n])]
    return next((least for least in _LEAST if all(n < least for n in others)), _LEAST[-1])
