"""How many rows oneDNN multiplies at once: few numbers, since each leaves something behind.

Contract: for each number of rows and each shape of a layer oneDNN makes kernels and keeps them (the
last 1,024), and a description stays beside it: 0.6 MB together (torch 2.13, AVX-512). A pack of
prompts and drafts has any number of rows, so a service would meet new ones for many thousands of
requests. Rows of zeros fill up to one of 32 sizes, or of 16 more with each doubling. A row has the
same bits whatever stands beside it, so that changes nothing but the time: 2% more rows in the mean.
"""

from torch import Tensor
from torch.nn import functional as F

_EXACT = 32  # up to here each number of rows is a size: what decodes pays for no row of zeros
_IN_DOUBLING = 16  # sizes between a power of two and the next


def row_size(rows: int) -> int:
    """The least size that holds so many rows; less than a sixteenth more than they are."""
    if rows <= _EXACT:
        return rows
    step = (1 << (rows - 1).bit_length()) // (2 * _IN_DOUBLING)
    return -(-rows // step) * step


def filled(x: Tensor) -> Tensor:
    """`x` [T, in], or a copy with rows of zeros at its end where T is no size."""
    missing = row_size(len(x)) - len(x)
    return F.pad(x, (0, 0, 0, missing)) if missing else x
