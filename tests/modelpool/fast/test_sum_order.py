"""Trials see another order of sums, and packed layers give a row alone the bits of any other."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from modelpool.fast import linear, sum_order
from modelpool.fast.linear import PackedWeight, can_pack
from modelpool.fast.sum_order import cancelling, least_rows

DTYPES = [dtype for dtype in (torch.bfloat16, torch.float32) if can_pack(dtype)]
pytestmark = pytest.mark.skipif(not DTYPES, reason="torch without oneDNN")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(1024, 96), (1152, 512), (2816, 320)])
def test_a_row_alone_has_the_bits_of_any_other(
    inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    x, weight = cancelling(40, inputs, outputs, dtype)
    packed = PackedWeight(weight, None)
    with torch.inference_mode():
        together = packed.multiply(x)
        for rows in (1, 2, 15, 16, 17, 32, 33):
            assert torch.equal(packed.multiply(x[:rows]), together[:rows]), rows
        for row, expected in zip(x, together, strict=True):
            assert torch.equal(packed.multiply(row), expected)


@pytest.mark.parametrize("least", [1, 2, 8])
def test_few_rows_are_filled_up_only_where_they_are_summed_otherwise(
    least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = list[int]()
    plain = sum_order.product

    def by_count(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
        """Fewer than `least` rows have another last bit."""
        counts.append(len(x))
        y = plain(F.pad(x, (0, 0, 0, 40 - len(x))), packed, bias)[: len(x)]
        return y if len(x) >= least else torch.nextafter(y, y + 1)

    for module in (sum_order, linear):
        monkeypatch.setattr(module, "product", by_count)
    monkeypatch.setattr(linear, "least_rows", least_rows.__wrapped__)
    x, weight = cancelling(3, 1152, 64, torch.float32)
    packed = PackedWeight(weight, None)
    together = by_count(F.pad(x, (0, 0, 0, 37)), sum_order.pack(weight))
    for rows in (1, 3):
        assert torch.equal(packed.multiply(x[:rows]), together[:rows])
        assert counts[-1] == max(rows, least)
