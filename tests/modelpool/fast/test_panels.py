"""A layer has the bits of whole numbers, whatever computes it and whatever stands beside a row."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from modelpool.checkpoint.block_values import BYTES_ZERO, GROUP, BlockValues
from modelpool.checkpoint.int4_values import in_4_bits
from modelpool.checkpoint.int8_values import INT8_LEVELS, Int8Values
from modelpool.fast import panels, quantised
from modelpool.fast.cpu import cpu_threads, int8_refusal
from modelpool.fast.int8 import Int8Weight, quantise_rows, rounded_to_levels
from modelpool.fast.joined import join_layers, joined
from modelpool.fast.panels import (
    _CHUNK,
    BlockWeight,
    Int8PanelWeight,
    PanelWeight,
    _Arena,
    exact_kernels,
    is_exact,
)
from modelpool.fast.quantised import QuantisedLinear, quantise_linears
from modelpool.kernels.library import LinearKernels, linear_kernels
from test_support.llama_models import draw

KERNELS = linear_kernels()
needs_kernels = pytest.mark.skipif(KERNELS is None, reason="no kernels: no compiler, or no AVX2")
SHAPES = ((1, 1), (33, 7), (100, 70), (128, 96), (736, 33), (1100, 130))
FORMS = ("q4_0", "q4_1", "q4_K", "int4", "int8", "q5_1", "q6_K", "iq4_xs", "groups")


def kernels() -> LinearKernels:
    assert KERNELS is not None
    return KERNELS


def some_blocks(form: str, outputs: int, inputs: int) -> BlockValues:
    """Random numbers in the form of a type."""
    groups = -(-inputs // GROUP)

    def number(most: int, *shape: int) -> Tensor:
        return torch.randint(most, (outputs, *shape)).byte()

    def halves(blocks: int) -> Tensor:
        return draw(outputs, blocks).half()

    if form == "int4":
        return in_4_bits(draw(outputs, inputs))
    if form == "int8":
        return BlockValues.rounded(draw(outputs, inputs))
    if form == "q4_0":
        return BlockValues(numbers=number(16, inputs), bits=4, zero=8, steps=halves(groups))
    if form == "q4_1":
        steps, bases = halves(groups), halves(groups)
        return BlockValues(numbers=number(16, inputs), bits=4, steps=steps, bases=bases)
    if form == "q5_1":
        steps, bases = halves(groups), halves(groups)
        return BlockValues(numbers=number(32, inputs), bits=5, steps=steps, bases=bases)
    if form == "groups":  # AWQ and GPTQ
        steps = halves(groups)
        return BlockValues(
            numbers=number(16, inputs), bits=4, steps=steps, bases=steps, centres=number(16, groups)
        )
    signed = torch.randint(-128, 128, (outputs, 2 * groups), dtype=torch.int8)
    if form == "q6_K":
        return BlockValues(
            numbers=number(64, inputs), bits=6, zero=32, steps=halves(1), scales=signed
        )
    if form == "iq4_xs":
        return BlockValues(
            numbers=number(256, inputs), bits=8, zero=BYTES_ZERO, steps=halves(1),
            scales=signed[:, :groups],
        )  # fmt: skip
    assert form == "q4_K"
    return BlockValues(
        numbers=number(16, inputs), bits=4, steps=halves(1), bases=halves(1),
        scales=number(64, groups).to(torch.int8), centres=number(64, groups),
    )  # fmt: skip


def expected(values: BlockValues, x: Tensor, bias: Tensor | None) -> Tensor:
    """Of the rounded activations and the plain weight."""
    y = (rounded_to_levels(x).double() @ values.plain().double().t()).float()
    return y if bias is None else y + bias


def by_row(values: Int8Values, x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    levels, largest = quantise_rows(x)
    sums = (levels.long() - 128) @ values.levels.long().t()
    y = sums.float() * (values.scales / INT8_LEVELS) * largest
    return (y if bias is None else y + bias).to(dtype)


@needs_kernels
@given(
    form=st.sampled_from([*FORMS, "W8A8"]),
    shape=st.sampled_from(SHAPES),
    rows=st.integers(1, 19) | st.sampled_from([64, 65, 133]),
    threads=st.integers(1, 2),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    is_biased=st.booleans(),
    scale=st.sampled_from([1e-20, 1.0, 1e15]),
)
def test_every_kernel_sums_whole_numbers_and_has_the_bits_of_plain_c(
    form: str,
    shape: tuple[int, int],
    rows: int,
    threads: int,
    dtype: torch.dtype,
    is_biased: bool,
    scale: float,
) -> None:
    inputs, outputs = shape
    bias = draw(outputs) if is_biased else None
    x = (draw(rows, inputs) * scale).to(dtype)
    weight: PanelWeight
    if form == "W8A8":
        whole = Int8Values.of(draw(outputs, inputs))
        wanted, weight = by_row(whole, x, bias, dtype), Int8PanelWeight(whole, bias, kernels())
    else:
        values = some_blocks(form, outputs, inputs)
        weight = BlockWeight(values, bias, kernels())
        wanted = weight.multiply(x, kernel="plain")
        summed = weight.multiply(x, torch.float32, kernel="plain")
        # Of what is added up: weights may cancel their centres.
        parts = replace(values, bases=None, centres=None).plain().abs().max()
        most = float(parts * rounded_to_levels(x).abs().sum(dim=1).max()) + 1e-30
        assert torch.allclose(summed, expected(values, x, bias), rtol=1e-5, atol=1e-6 * most)
    with cpu_threads(threads):
        for name in kernels().available:
            assert torch.equal(weight.multiply(x, kernel=name), wanted), name
            alone = torch.cat([weight.multiply(row, kernel=name) for row in x.chunk(rows)])
            assert torch.equal(alone, wanted), name


@needs_kernels
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_an_output_can_be_read_as_numbers(form: str, shape: tuple[int, int]) -> None:
    inputs, outputs = shape
    values = some_blocks(form, outputs, inputs)
    ids = torch.cat((torch.randint(outputs, (5,)), torch.tensor([0, outputs - 1])))
    got, wanted = BlockWeight(values, None, kernels()).rows(ids), values.plain()[ids]
    if values.units is None:
        assert torch.equal(got, wanted)
    else:  # the kernels have them over 127
        assert torch.allclose(got, wanted, rtol=1e-6, atol=0)


@needs_kernels
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rows", [2, 20])
@pytest.mark.parametrize("form", ["q4_0", "q6_K", "int8"])
def test_a_row_that_is_not_finite_fails_alone(value: float, rows: int, form: str) -> None:
    x = draw(rows, 96)
    weight = BlockWeight(some_blocks(form, 40, 96), None, kernels())
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


@pytest.mark.parametrize("spread", [1e-6, 1.0, 1e4])
def test_rounding_to_8_bits_keeps_small_groups_and_small_columns(spread: float) -> None:
    """The largest error is half a step of the group, wherever the output's largest weight is."""
    weight = draw(5, 96) * spread
    weight[:, 32:64] *= 1e-4
    weight[2] = 0
    error = (BlockValues.rounded(weight).plain() - weight).view(5, 3, 32).abs().amax(dim=2)
    step = weight.view(5, 3, 32).abs().amax(dim=2) / 127
    assert bool((error <= 0.51 * step).all())


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
    assert set(shared_kinds(model)) == {BlockWeight}
    assert [one.roundings[0][0] for one in model] == ["int4", "int8"]  # type: ignore[index]


@needs_kernels
@pytest.mark.skipif(int8_refusal() is not None, reason=str(int8_refusal()))
@pytest.mark.parametrize("name", ["avx512-vnni", "avx2"])
@pytest.mark.parametrize("amx", [False, True])
def test_the_kernels_compute_w8a8_where_they_are_faster(
    name: str, amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised, "has_amx", lambda: amx)
    monkeypatch.setattr(quantised, "exact_kernels", lambda: replace(kernels(), name=name))
    model = layers()
    stored = {str(at): Int8Values.of(one.weight) for at, one in enumerate(model)}  # type: ignore[arg-type]
    assert quantise_linears(model, stored) == []
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
        assert panels.exact_kernels() is None
        assert "has other bits here" in caplog.text
    finally:
        exact_kernels.cache_clear()


@needs_kernels
@pytest.mark.parametrize("rows", [1, 7, 70])
@pytest.mark.parametrize(
    "forms", [("q4_K", "q4_K", "q6_K"), ("q5_1", "W8A8", "q4_0"), ("W8A8", "W8A8", "int8")]
)
def test_layers_in_any_forms_give_together_what_they_give_alone(
    forms: tuple[str, str, str], rows: int
) -> None:
    """Biased or not, each of its own."""
    parent, outputs = nn.Module(), (70, 33, 41)
    for name, form, size in zip(("q_proj", "k_proj", "v_proj"), forms, outputs, strict=True):
        bias = draw(size) if name != "k_proj" else None
        weight: PanelWeight
        if form == "W8A8":
            weight = Int8PanelWeight(Int8Values.of(draw(size, 320)), bias, kernels())
        else:
            weight = BlockWeight(some_blocks(form, size, 320), bias, kernels())
        setattr(parent, name, QuantisedLinear(weight, 0, size, bias, is_tied=False))
    layers = list(parent.children())
    x = draw(rows, 320)
    alone = [layer(x) for layer in layers]
    assert join_layers([parent]) == 2
    with cpu_threads(2):
        for found in (joined(*layers)(x), [layer(x) for layer in layers]):
            assert all(map(torch.equal, found, alone))
    assert join_layers([parent]) == 0


def test_memory_that_was_taken_in_a_cycle_can_be_written_outside_of_it() -> None:
    """A drafter may be loaded within a cycle, in inference mode, and a target later in none."""
    arena = _Arena()
    with torch.inference_mode():
        first = arena.take(100)
    second, large = arena.take(70), arena.take(_CHUNK)
    for one in (first, second, large):
        one.copy_(torch.ones(len(one), dtype=torch.uint8))
        assert one.data_ptr() % 64 == 0
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert first.sum() == 100
