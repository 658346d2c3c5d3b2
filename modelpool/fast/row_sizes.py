"""Sizes that numbers of rows are padded to, since oneDNN keeps memory for each number it meets.

Contract: for each number of rows and each shape of a layer, oneDNN makes kernels and keeps them
(the last 1,024) with a description: 0.6 MB together (torch 2.13, AVX-512). A pack of prompts and
drafts has any number of rows, so a service would meet new ones for many thousands of requests. Rows
of zeros pad it to one of 32 sizes, or of 16 more with each doubling. A row has the same bits beside
any other rows, so this only costs time: 2% more rows on average.
"""

from torch import Tensor
from torch.nn import functional as F

_EXACT = 32  # up to here each number of rows is a size, so that decoding is not padded
_IN_DOUBLING = 16  # sizes between a power of two and the next


def row_size(rows: int) -> int:
    """Return the smallest size for `rows` rows, which is less than a sixteenth more."""
    if rows <= _EXACT:
        return rows
    step = (1 << (rows - 1).bit_length()) // (2 * _IN_DOUBLING)
    return -(-rows // step) * step


def filled(x: Tensor) -> Tensor:
    """Return `x` [T, in], or a copy with rows of zeros at its end if T is not a size."""
    missing = row_size(len(x)) - len(x)
    return F.pad(x, (0, 0, 0, missing)) if missing else x
