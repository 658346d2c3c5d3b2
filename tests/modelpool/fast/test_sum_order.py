"""Trials see another order of sums, and packed layers give a row alone the bits of any other."""

import pytest
import torch
from torch import Tensor

from modelpool.fast import linear, sum_order
from modelpool.fast.linear import PackedWeight, can_pack
from modelpool.fast.sum_order import cancelling, one_row_sums_alike

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


@pytest.mark.parametrize("alike", [True, False])
def test_a_row_alone_is_computed_twice_only_where_it_is_summed_otherwise(
    alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = list[int]()
    plain = sum_order.product

    def by_count(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
        """A row alone has another last bit, or not."""
        counts.append(x.numel() // x.shape[-1])
        y = plain(x.reshape(1, -1).expand(2, -1), packed, bias)[:1] if len(x) == 1 else None
        if y is None:
            return plain(x, packed, bias)
        return y if alike else torch.nextafter(y, y + 1)

    for module in (sum_order, linear):
        monkeypatch.setattr(module, "product", by_count)
    monkeypatch.setattr(linear, "one_row_sums_alike", one_row_sums_alike.__wrapped__)
    x, weight = cancelling(1, 1152, 64, torch.float32)
    packed = PackedWeight(weight, None)
    together = plain(x.expand(2, -1), sum_order.pack(weight))
    assert torch.equal(packed.multiply(x), together[:1])
    assert counts[-1] == (1 if alike else 2)
