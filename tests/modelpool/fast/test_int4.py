"""A layer in int4 has the bits of its expansion to int8, whatever computes it; one in blocks those
of whole numbers in each group."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from modelpool.checkpoint.block_values import BlockValues
from modelpool.checkpoint.int4_values import Int4Values
from modelpool.checkpoint.int8_values import INT8_LEVELS
from modelpool.fast import int4, quantised
from modelpool.fast.cpu import cpu_threads, int8_refusal
from modelpool.fast.int4 import (
    BlockWeight,
    Int4Weight,
    Int8PanelWeight,
    PanelWeight,
    exact_kernels,
    is_exact,
)
from modelpool.fast.int8 import Int8Weight, quantise_rows
from modelpool.fast.quantised import QuantisedLinear, quantise_linears
from modelpool.kernels.library import LinearKernels, linear_kernels
from test_support.llama_models import draw

KERNELS = linear_kernels()
needs_kernels = pytest.mark.skipif(KERNELS is None, reason="no kernels: no compiler, or no AVX2")
SHAPES = ((1, 1), (33, 7), (100, 70), (128, 96), (736, 33), (1100, 130))


def kernels() -> LinearKernels:
    assert KERNELS is not None
    return KERNELS


def expected(values: Int4Values, x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """By whole numbers, then both scales, element by element."""
    expanded, (levels, largest) = values.expanded(), quantise_rows(x)
    sums = (levels.long() - 128) @ expanded.levels.long().t()
    y = sums.float() * (expanded.scales / INT8_LEVELS) * largest
    return (y if bias is None else y + bias).to(dtype)


@needs_kernels
@given(
    shape=st.sampled_from(SHAPES),
    rows=st.integers(1, 70),
    threads=st.integers(1, 2),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    is_biased=st.booleans(),
    scale=st.sampled_from([1e-20, 1.0, 1e20]),
)
def test_every_kernel_sums_whole_numbers(
    shape: tuple[int, int],
    rows: int,
    threads: int,
    dtype: torch.dtype,
    is_biased: bool,
    scale: float,
) -> None:
    inputs, outputs = shape
    values, bias = Int4Values.of(draw(outputs, inputs)), draw(outputs) if is_biased else None
    x = (draw(rows, inputs) * scale).to(dtype)
    wanted = expected(values, x, bias, dtype)
    weights: list[PanelWeight] = [Int4Weight([values], bias, kernels())]
    weights.append(Int8PanelWeight([values.expanded()], bias, kernels()))
    with cpu_threads(threads):
        for name, weight in itertools.product(kernels().available, weights):
            assert torch.equal(weight.multiply(x, kernel=name), wanted), name


def some_blocks(outputs: int, groups: int, block: int, scaled: bool) -> BlockValues:
    """`block`: groups of one; `scaled`: with scales and centres of groups."""
    inputs, small = groups * 32, [torch.randint(64, (outputs, groups)).byte() for _ in range(2)]
    halves = draw(2, outputs, groups // block).half()
    nibbles = torch.randint(16, (outputs, inputs)).byte()
    return BlockValues(nibbles, *halves, *(small if scaled else []))


@needs_kernels
@given(
    outputs=st.sampled_from([1, 31, 32, 70]),
    blocks=st.integers(1, 5),
    form=st.sampled_from([(1, False), (1, True), (3, True), (4, True), (8, True)]),
    rows=st.integers(1, 19),
    threads=st.integers(1, 2),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    is_biased=st.booleans(),
)
def test_every_kernel_adds_the_groups_of_blocks_in_their_order(
    outputs: int,
    blocks: int,
    form: tuple[int, bool],
    rows: int,
    threads: int,
    dtype: torch.dtype,
    is_biased: bool,
) -> None:
    values = some_blocks(outputs, blocks * form[0], *form)
    bias = draw(outputs) if is_biased else None
    x = draw(rows, values.nibbles.shape[1]).to(dtype)
    levels, largest = quantise_rows(x)
    wanted = values.multiply(levels.long() - 128) * (torch.ones(outputs) / INT8_LEVELS) * largest
    wanted = (wanted if bias is None else wanted + bias).to(dtype)
    weight = BlockWeight([values], bias, kernels())
    with cpu_threads(threads):
        for name in kernels().available:
            assert torch.equal(weight.multiply(x, kernel=name), wanted), name
            alone = torch.cat([weight.multiply(row, kernel=name) for row in x.chunk(rows)])
            assert torch.equal(alone, wanted), name


@needs_kernels
@pytest.mark.skipif(int8_refusal() is not None, reason=str(int8_refusal()))
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_layer_has_the_bits_of_its_expansion(
    inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    values, bias = Int4Values.of(draw(outputs, inputs)), draw(outputs)
    small, wide = Int4Weight([values], bias, kernels()), Int8Weight([values.expanded()], bias)
    x = draw(3, 23, inputs, dtype=dtype)
    assert torch.equal(small.multiply(x), wide.multiply(x))
    assert small.multiply(x).dtype == dtype
    assert small.multiply(x[:0]).shape == (0, 23, outputs)


@needs_kernels
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rows", [2, 20])
@pytest.mark.parametrize("in_blocks", [False, True])
def test_a_row_that_is_not_finite_fails_alone(value: float, rows: int, in_blocks: bool) -> None:
    x = draw(rows, 96)
    weight: PanelWeight = Int4Weight([Int4Values.of(draw(40, 96))], None, kernels())
    if in_blocks:
        weight = BlockWeight([some_blocks(40, 3, 1, scaled=False)], None, kernels())
    for name in kernels().available:
        good = weight.multiply(x, kernel=name)
        for dtype in (torch.float32, torch.bfloat16):
            bad = x.to(dtype, copy=True)
            whole = weight.multiply(bad, kernel=name)
            bad[1, 50] = value
            got = weight.multiply(bad, kernel=name)
            assert not torch.isfinite(got[1]).any()
            others = [row for row in range(rows) if row != 1]
            assert torch.equal(got[others], whole[others])
        assert torch.isfinite(good).all()


def layers() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 96, bias=False))
    return model.requires_grad_(False)


def shared_kinds(model: nn.Sequential) -> list[type]:
    found = [layer for layer in model if isinstance(layer, QuantisedLinear)]
    assert len(found) == len(model)
    return [type(layer.shared) for layer in found]


@needs_kernels
def test_a_layer_that_four_bits_hold_badly_is_in_int8() -> None:
    model = nn.Sequential(nn.Linear(1024, 256), nn.Linear(1024, 256)).requires_grad_(False)
    torch.manual_seed(0)
    heavy = torch.distributions.StudentT(2.1).sample((256, 1024))
    model[1].weight = nn.Parameter(heavy, requires_grad=False)
    assert quantise_linears(model, weights="int4") == []
    small, wide = shared_kinds(model)
    assert small is Int4Weight
    assert wide in (Int8Weight, Int8PanelWeight)


@needs_kernels
@pytest.mark.skipif(int8_refusal() is not None, reason=str(int8_refusal()))
@pytest.mark.parametrize("name", ["avx512-vnni", "avx2"])
@pytest.mark.parametrize("amx", [False, True])
def test_the_kernels_compute_int8_where_they_are_faster(
    name: str, amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised, "has_amx", lambda: amx)
    monkeypatch.setattr(quantised, "exact_kernels", lambda: replace(kernels(), name=name))
    model = layers()
    assert quantise_linears(model) == []
    is_faster = name == "avx512-vnni" and not amx
    assert set(shared_kinds(model)) == {Int8PanelWeight if is_faster else Int8Weight}


@needs_kernels
def test_a_kernel_with_other_bits_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert is_exact(kernels())
    real = LinearKernels.multiply

    def wrong(self: LinearKernels, weight: object, x: Tensor, y: Tensor, *also: object) -> None:
        real(self, weight, x, y, *also)  # type: ignore[arg-type]
        y[-1, -1] += 1.0

    monkeypatch.setattr(LinearKernels, "multiply", wrong)
    exact_kernels.cache_clear()
    try:
        assert int4.exact_kernels() is None
        assert "has other bits here" in caplog.text
    finally:
        exact_kernels.cache_clear()
