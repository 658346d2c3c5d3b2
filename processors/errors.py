"""Errors of the data plane."""

import numpy as np
from numpy.typing import NDArray


class NonFiniteLogits(RuntimeError):
    """Error raised if a model's logits hold NaN for some rows, whose cache may hold NaN too.

    Attributes:
        rows: these rows, ascending; the cache of other rows is not affected.
    """

    def __init__(self, model: str, rows: NDArray[np.int64]) -> None:
        super().__init__(f"{model} gave logits that are not numbers")
        self.rows = rows


class RowFault(RuntimeError):
    """Error of our code on one row's settings, grammar or text: it can choose no token."""
