"""Errors of the data plane."""

import numpy as np
from numpy.typing import NDArray


class NonFiniteLogits(RuntimeError):
    """A model's logits hold NaN for some rows, whose cache may hold NaN too; others' does not.

    Attributes:
        rows: these rows, ascending.
    """

    def __init__(self, model: str, rows: NDArray[np.int64]) -> None:
        super().__init__(f"{model} gave logits that are not numbers")
        self.rows = rows


class RowFault(RuntimeError):
    """Our own code failed on one row's settings, grammar or text: no token can be chosen for it."""
