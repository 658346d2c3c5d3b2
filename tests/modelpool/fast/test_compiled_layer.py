"""Layers in the C library compute what torch's operators do, and each row by itself."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from modelpool.fast import lean_forward
from modelpool.fast.compiled_layer import CompiledLayer
from modelpool.fast.cpu import cpu_threads
from modelpool.fast.direct_forward import direct_forward_of
from modelpool.fast.forward_parts import ShortLayer
from modelpool.fast.lean_forward import LeanForward, lean_forward_of
from modelpool.fast.panels import exact_kernels
from modelpool.fast.rotation import Table
from modelpool.packed_model import PackedModel
from test_support.llama_models import (
    LLAMA_SHAPED,
    SHAPE,
    VOCAB,
    make_model,
    shaped,
)

ODD = {**SHAPE, "hidden_size": 44, "intermediate_size": 53, "num_hidden_layers": 1, "head_dim": 6}
pytestmark = pytest.mark.skipif(exact_kernels() is None, reason="no C library")


def both(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype = torch.bfloat16,
    scale: float = 1.0,
    **more: Any,
) -> tuple[PackedModel, LeanForward, LeanForward]:
    """A model in int4, its forward in the library, and without. `scale`: of what MLPs read."""
    config = LLAMA_SHAPED[name]()
    config.update(more)
    model = make_model(config, dtype)
    for layer in model.model.layers:
        layer.post_attention_layernorm.weight.data.mul_(scale)
    packed = PackedModel.wrap("m", model, VOCAB)
    packed.quantise_weights(weights="int4")
    direct_forward_of(packed)
    compiled = lean_forward_of(packed)
    monkeypatch.setattr(lean_forward, "compiled_layer", lambda *_: None)
    plain = lean_forward_of(packed)
    assert compiled is not None
    assert plain is not None
    return packed, compiled, plain


def inputs(forward: LeanForward, rows: int) -> tuple[Tensor, Table, Tensor]:
    """Of the first layer: a residual, angles, and what attention saw."""
    layer = forward._layers[0]
    draws = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, forward._embedded.weight.shape[1], generator=draws)
    angles = forward._angles[layer.angles](torch.arange(rows) % 16)
    heads = torch.randn(rows, layer.heads * angles[0].shape[-1], generator=draws)
    return x, angles, heads


def through(
    layer: CompiledLayer | ShortLayer, x: Tensor, angles: Table, seen: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, values, and the residual behind the layer."""
    residual, read = x.clone(), layer.before(x)
    found = layer.projected(read, angles)
    layer.add_to(residual, read, seen)
    return *found, residual


def differ(got: Tensor, wanted: Tensor) -> float:
    """Where a level of activations is another one, by 1 / 127 of the largest; else by rounding."""
    return float((got.double() - wanted.double()).abs().mean() / wanted.double().std())


@pytest.mark.parametrize(
    ("name", "dtype", "scale", "more"),
    [
        ("llama", torch.bfloat16, 1.0, {}),
        ("llama", torch.float32, 1e-3, {}),
        ("llama", torch.float32, 30.0, {}),
        ("llama", torch.float32, 1e4, {}),  # gates beyond what an exponential holds
        ("llama-biased", torch.float32, 1.0, ODD),
        ("qwen3", torch.bfloat16, 1.0, ODD),
    ],
)
@torch.inference_mode()
def test_a_layer_computes_what_operators_do(
    name: str,
    dtype: torch.dtype,
    scale: float,
    more: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, compiled, plain = both(name, monkeypatch, dtype, scale, **more)
    assert type(compiled._layers[0]) is CompiledLayer
    assert type(plain._layers[0]) is ShortLayer
    given = inputs(compiled, 40)
    wanted = through(plain._layers[0], *given)
    for got, expected in zip(through(compiled._layers[0], *given), wanted, strict=True):
        assert got.dtype is expected.dtype or got.dtype is dtype
        assert got.isfinite().all()
        assert differ(got, expected) < 2e-3


@pytest.mark.parametrize(("name", "more"), [("llama", ODD), ("qwen3", {})])
@torch.inference_mode()
def test_a_token_has_its_bits_in_all_company_and_on_all_threads(
    name: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, compiled, _ = both(name, monkeypatch, **more)
    layer, sizes = compiled._layers[0], [*range(1, 71)]
    x, (cos, sin), seen = inputs(compiled, sum(sizes))  # so many that threads share the rows
    with cpu_threads(1):
        whole = through(layer, x, (cos, sin), seen)
    with cpu_threads(3):
        shared = through(layer, x, (cos, sin), seen)
    assert all(map(torch.equal, shared, whole))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    for rows, threads in itertools.product(torch.split(order, sizes), (1, 2)):
        with cpu_threads(threads):
            got = through(layer, x[rows], (cos[rows], sin[rows]), seen[rows])
        assert all(torch.equal(one, of_all[rows]) for one, of_all in zip(got, whole, strict=True))


@torch.inference_mode()
def test_what_is_no_number_fails_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _, compiled, plain = both("llama", monkeypatch)
    x, angles, seen = inputs(compiled, 5)
    good = through(compiled._layers[0], x, angles, seen)
    for row, value in enumerate((float("nan"), float("inf"), float("-inf"))):
        x[row, 3] = value
    seen[3, 3] = float("nan")
    for layer in (compiled._layers[0], plain._layers[0]):
        *heads, residual = through(layer, x, angles, seen)
        assert not any(each[:3].isfinite().any() for each in heads)
        assert not residual[:4].isfinite().any()
    *heads, residual = through(compiled._layers[0], x, angles, seen)
    assert all(torch.equal(one[3:], other[3:]) for one, other in zip(heads, good, strict=False))
    assert torch.equal(residual[4], good[2][4])


@pytest.mark.parametrize("name", ["gemma", "granite", "olmo2", "llama-gelu", "phi3", "cohere"])
def test_other_shapes_are_left_to_operators(name: str) -> None:
    packed = PackedModel.wrap("m", make_model(shaped(name), torch.bfloat16), VOCAB)
    packed.quantise_weights(weights="int4")
    direct_forward_of(packed)
    lean = lean_forward_of(packed)
    assert lean is not None
    assert {type(layer) for layer in lean._layers} == {ShortLayer}
