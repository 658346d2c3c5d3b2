"""Int8 layers say nearly what plain ones say, and a row's bits are its own."""

import copy
import gc
import math
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from modelpool.checkpoint.int8_values import Int8Values
from modelpool.config import KeptWeights
from modelpool.fast.cpu import cpu_threads, int8_refusal
from modelpool.fast.direct_forward import direct_forward_of
from modelpool.fast.int8 import Int8Weight, quantise_rows
from modelpool.fast.joined import join_layers, joined
from modelpool.fast.lean_forward import lean_forward_of
from modelpool.fast.linear import parameter_count
from modelpool.fast.quantised import QuantisedLinear, quantise_linears
from modelpool.packed_model import PackedModel
from test_support.llama_models import (
    LLAMA_SHAPED,
    OTHERS,
    SHAPED,
    VOCAB,
    Feeder,
    draw,
    feed_tree,
    make_model,
    shaped,
)

pytestmark = pytest.mark.skipif(int8_refusal() is not None, reason=str(int8_refusal()))
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def weight(inputs: int, outputs: int, bias: Tensor | None = None) -> Int8Weight:
    return Int8Weight(Int8Values.of(draw(outputs, inputs)), bias)


def quantised(layer: nn.Module) -> QuantisedLinear:
    model = nn.Sequential(layer.requires_grad_(False))
    assert quantise_linears(model) == []
    assert isinstance(model[0], QuantisedLinear)
    return model[0]


def test_products_are_whole_numbers_times_both_scales() -> None:
    values, x = Int8Values.of(draw(24, 40)), draw(5, 40)
    levels, largest = quantise_rows(x)
    sums = (levels.long() - 128) @ values.levels.long().t()
    expected = sums.float() * (values.scales / 127) * largest
    assert torch.equal(Int8Weight(values, None).multiply(x), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 48), (33, 7), (640, 2560), (2816, 1024)])
def test_a_layer_says_what_the_plain_one_says_within_two_percent(
    inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    plain = nn.Linear(inputs, outputs).to(dtype).requires_grad_(False)
    x = draw(19, inputs, dtype=dtype)
    expected, got = plain(x), quantised(copy.deepcopy(plain))(x)
    assert got.dtype == dtype
    error = (got.double() - expected.double()).norm() / expected.double().norm()
    assert error < 0.02


@given(
    inputs=st.sampled_from([1, 3, 64, 200, 1100]),
    outputs=st.sampled_from([1, 5, 64, 130]),
    rows=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**20),
)
def test_a_row_has_the_same_bits_alone_and_in_any_pack(
    inputs: int, outputs: int, rows: int, dtype: torch.dtype, seed: int
) -> None:
    drawn = torch.Generator().manual_seed(seed)
    scales = torch.exp(4 * torch.randn(rows, 1, generator=drawn))
    x = (scales * torch.randn(rows, inputs, generator=drawn)).to(dtype)
    one = weight(inputs, outputs, draw(outputs))
    together = one.multiply(x)
    for row in {0, rows // 2, rows - 1}:
        assert torch.equal(one.multiply(x[row : row + 1])[0], together[row])
    order = torch.randperm(rows, generator=drawn)
    assert torch.equal(one.multiply(x[order]), together[order])


def test_the_bits_do_not_depend_on_threads() -> None:
    one, x, found = weight(640, 640), draw(37, 640), []
    for threads in (1, 2, 3):
        with cpu_threads(threads):
            found.append(one.multiply(x))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("harm", [1e30, math.inf, math.nan, 0.0])
def test_what_stands_beside_a_row_does_not_touch_it(harm: float) -> None:
    one, x = weight(96, 40, draw(40)), draw(9, 96)
    expected = one.multiply(x)
    x[4] *= harm
    got = one.multiply(x)
    others = [row for row in range(9) if row != 4]
    assert torch.equal(got[others], expected[others])
    if harm == 0.0:
        assert torch.equal(got[4], draw(40))
    elif math.isnan(harm):
        assert not got[4].isfinite().any(), "a fault must show"


def test_the_largest_sums_are_exact() -> None:
    """They would saturate in 16 bits, and exceed what float32 counts in ones."""
    inputs = 5000
    most = Int8Values(torch.full((3, inputs), 127, dtype=torch.int8), torch.full((3,), 127.0))
    got = Int8Weight(most, None).multiply(torch.ones(2, inputs))
    assert torch.equal(got, torch.full((2, 3), 127.0 * 127 * inputs))


def test_layers_that_read_the_same_input_are_computed_together_to_the_same_bits() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, n) for n in (48, 16, 16))
            self.o_proj = nn.Linear(48, 32)

    attention = Attention().requires_grad_(False)
    alone = [quantised(copy.deepcopy(each)) for each in attention.children()]
    assert quantise_linears(attention) == []
    assert join_layers([attention]) == 2
    layers: list[Any] = list(attention.children())
    assert len({id(layer.shared) for layer in layers}) == 2
    x = draw(5, 32)
    for together, single, one in zip(joined(*layers[:3])(x), layers, alone, strict=False):
        assert torch.equal(together, one(x))
        assert torch.equal(single(x), one(x))


@pytest.mark.parametrize("tied", ["llama", "llama-tied"])
def test_plain_weights_are_let_go_and_parameters_counted(tied: str) -> None:
    model: Any = make_model(LLAMA_SHAPED[tied](), torch.bfloat16)
    count = parameter_count(model)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    weights = [weakref.ref(layer.weight) for layer in linears]
    del linears
    assert quantise_linears(model) == []
    gc.collect()
    assert sum(each() is not None for each in weights) == (tied == "llama-tied")
    assert parameter_count(model) == count


def wrap(name: str, dtype: torch.dtype, weights: KeptWeights = "int8") -> PackedModel:
    config = (LLAMA_SHAPED | OTHERS)[name]() if name not in SHAPED else shaped(name)
    packed = PackedModel.wrap("m", make_model(config, dtype), VOCAB)
    packed.quantise_weights(weights=weights)
    direct_forward_of(packed)
    return packed


@pytest.mark.parametrize(
    ("name", "shared"), [("llama", 2), ("phi", 0), ("phi3", 0), ("gemma2", 2), ("qwen3_moe", 1)]
)
def test_only_layers_that_are_called_together_share_a_weight(name: str, shared: int) -> None:
    packed = wrap(name, torch.float32)
    modules = list(packed.model.modules())
    layers = [module for module in modules if isinstance(module, QuantisedLinear)]
    weights = [id(layer.shared) for layer in layers]
    depth = packed.model.config.num_hidden_layers
    several = {each for each in weights if weights.count(each) > 1}
    assert len(several) == depth * shared


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LLAMA_SHAPED)
def test_the_direct_forward_has_the_bits_of_the_model_and_the_lean_one_nearly_its_logits(
    name: str, dtype: torch.dtype
) -> None:
    packed = wrap(name, dtype)
    direct, lean = direct_forward_of(packed), lean_forward_of(packed)
    assert direct is not None
    assert lean is not None
    feeders = Feeder(packed.forward, packed), Feeder(direct, packed), Feeder(lean, packed)
    for counts in (dict.fromkeys(range(4), 6), {0: 1, 1: 4, 3: 2}, {0: 3, 1: 20}, {3: 1}):
        expected, got, near = (feeder.feed(counts) for feeder in feeders)
        assert torch.equal(got, expected)
        assert (near.double() - expected.double()).norm() < 0.15 * expected.double().norm()
    assert torch.equal(feed_tree(direct, packed), feed_tree(packed.forward, packed))
    for forward in (direct, lean):
        assert Feeder(forward, packed).feed({0: 6}, []).shape == (0, VOCAB)
        wanted = Feeder(forward, packed).feed({0: 6}, [4, 2])
        assert torch.equal(wanted, Feeder(forward, packed).feed({0: 6})[[4, 2]])
