"""oneDNN meets few numbers of rows, and rows of zeros are nowhere to be seen."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from modelpool.checkpoint.int8_values import Int8Values
from modelpool.fast.cpu import int8_refusal
from modelpool.fast.int8 import Int8Weight
from modelpool.fast.linear import PackedLinear, can_pack
from modelpool.fast.row_sizes import filled, row_size


@given(st.integers(0, 10**6))
def test_a_size_holds_the_rows_with_less_than_a_sixteenth_to_spare(rows: int) -> None:
    size = row_size(rows)
    assert rows <= size <= rows * 17 / 16
    assert row_size(size) == size
    assert size <= row_size(rows + 1)


@given(st.integers(1, 200))
def test_what_is_filled_begins_with_the_rows_and_ends_in_zeros(rows: int) -> None:
    x = torch.arange(1, rows + 1)[:, None].expand(rows, 3)
    made = filled(x)
    assert torch.equal(made[:rows], x)
    assert len(made) == row_size(rows)
    assert not made[rows:].any()


Kind = Callable[[torch.dtype], tuple[Callable[[Tensor], Tensor], Any, str]]


def packed(dtype: torch.dtype) -> tuple[Callable[[Tensor], Tensor], Any, str]:
    layer = PackedLinear(nn.Linear(96, 48).requires_grad_(False).to(dtype))
    return layer.forward, torch.ops.mkldnn, "_linear_pointwise"


def int8(dtype: torch.dtype) -> tuple[Callable[[Tensor], Tensor], Any, str]:
    weight = Int8Weight(Int8Values.of(torch.randn(48, 96)), torch.randn(48))
    return weight.multiply, torch.ops.onednn, "qlinear_pointwise"


@pytest.mark.parametrize("kind", [packed, int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_asks_for_few_sizes_and_answers_each_row_as_before(
    kind: Kind, dtype: torch.dtype
) -> None:
    if not can_pack(dtype) or (kind is int8 and int8_refusal()):
        pytest.skip("no such products on this CPU")
    multiply, place, operator = kind(dtype)
    x = torch.randn(300, 96).to(dtype)
    with mock.patch.object(place, operator, wraps=getattr(place, operator)) as asked:
        whole = multiply(x)
        for rows in [*range(30, 140), 171, 200, 257, 299]:
            assert torch.equal(multiply(x[:rows]), whole[:rows]), rows
        assert multiply(x[:70].view(2, 35, 96)).shape == (2, 35, 48)
    sizes = {call.args[0].numel() // 96 for call in asked.call_args_list}
    assert {30, 31, 32, 34, 64, 68} <= sizes
    assert all(row_size(size) == size for size in sizes)
