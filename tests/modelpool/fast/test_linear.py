"""Packed linear layers say what plain ones say, and nothing keeps the plain weights alive."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from modelpool import ModelPool
from modelpool.fast.cpu import has_amx
from modelpool.fast.linear import PackedLinear, can_pack, pack_linears, parameter_count
from test_support.factories import VOCAB_SIZE, pool_of, save_llama

pytestmark = pytest.mark.skipif(not can_pack(torch.float32), reason="torch without oneDNN")
DTYPES = [dtype for dtype in ("bfloat16", "float32") if can_pack(getattr(torch, dtype))]
needs_bfloat16 = pytest.mark.skipif("bfloat16" not in DTYPES, reason="oneDNN without bfloat16")


def linear(inputs: int, outputs: int, bias: bool = False, dtype: str = "bfloat16") -> nn.Linear:
    return nn.Linear(inputs, outputs, bias).requires_grad_(False).to(getattr(torch, dtype))


def draw(*shape: int, dtype: str = "bfloat16") -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return drawn.to(getattr(torch, dtype))


@pytest.mark.parametrize(("inputs", "outputs"), [(32, 48), (160, 4096), (2560, 640)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_values_are_the_plain_ones_for_any_number_of_rows(
    inputs: int, outputs: int, bias: bool, dtype: str
) -> None:
    plain = linear(inputs, outputs, bias, dtype)
    packed = PackedLinear(plain)
    with torch.inference_mode():
        x = draw(1, 128, inputs, dtype=dtype)
        expected = plain(x)
        if dtype == "float32":  # another library's product
            torch.testing.assert_close(packed(x), expected, atol=1e-5, rtol=1e-5)
            expected = packed(x)
        elif has_amx():  # whose order of sums differs with the number of rows
            torch.testing.assert_close(packed(x), expected, atol=1e-2, rtol=1e-2)
            expected = packed(x)
        for rows in (1, 2, 3, 5, 8, 16, 17, 33, 64, 128):
            assert torch.equal(packed(x[:, :rows]), expected[:, :rows]), rows


@needs_bfloat16
@pytest.mark.parametrize("shape", [(2816,), (1, 2816), (1, 1, 2816)])
def test_a_wide_row_alone_keeps_its_leading_shape(shape: tuple[int, ...]) -> None:
    packed = PackedLinear(linear(2816, 64, bias=True))
    assert packed(draw(*shape)).shape == (*shape[:-1], 64)


@needs_bfloat16
@pytest.mark.parametrize("leading", [(), (0,), (1, 0), (3,), (2, 3, 4)])
def test_any_leading_shape_is_accepted(leading: tuple[int, ...]) -> None:
    plain = linear(32, 48, bias=True)
    x = draw(*leading, 32)
    packed = PackedLinear(plain)
    assert packed(x).shape == (*leading, 48)
    assert torch.equal(packed(x), plain(x))
    apart = draw(7, 64)[:, ::2]
    assert torch.equal(packed(apart), plain(apart))


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path).requires_grad_(False)


@needs_bfloat16
@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_model_says_what_it_said(tied: bool, tmp_path: Path) -> None:
    model = load(save_llama(tmp_path, dtype="bfloat16", tied=tied))
    tokens = torch.arange(20).unsqueeze(0) * 7 % VOCAB_SIZE
    with torch.inference_mode():
        expected = model(tokens).logits
    head, count = model.lm_head.weight.clone(), parameter_count(model)
    assert pack_linears(model) == 2 * 7 + 1
    with torch.inference_mode():
        assert torch.equal(model(tokens).logits, expected)
    assert model.dtype == torch.bfloat16
    assert parameter_count(model) == count
    assert torch.equal(model.get_output_embeddings().weight, head)
    assert pack_linears(model) == 0
    if tied:
        assert torch.equal(model.get_input_embeddings().weight, head)


class _Louder(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@needs_bfloat16
def test_what_is_no_plain_layer_stays_as_it_is() -> None:
    hooked, known_to_accelerate = linear(8, 8), linear(8, 8)
    hooked.register_forward_hook(lambda module, inputs, output: output + 1)
    known_to_accelerate._hf_hook = nn.Identity()
    others = [_Louder(8, 8).bfloat16(), hooked, known_to_accelerate, linear(8, 8, dtype="float32")]
    model = nn.Sequential(*others)
    assert pack_linears(model) == 0
    assert list(model) == others


@needs_bfloat16
def test_a_layer_in_two_places_stays_one_layer() -> None:
    shared = linear(8, 8)
    model = nn.Sequential(shared, nn.Sequential(shared))
    x = draw(3, 8)
    expected = model(x)
    assert pack_linears(model) == 1
    assert torch.equal(model(x), expected)
    assert sum(isinstance(module, PackedLinear) for module in model.modules()) == 1


@needs_bfloat16
@pytest.mark.parametrize("pack", [True, False])
def test_a_pool_packs_what_it_loads_unless_told_not_to(pack: bool, tmp_path: Path) -> None:
    path = save_llama(tmp_path, dtype="bfloat16")
    pool = pool_of(path, pack_weights=pack)
    packed = pool.get("m")
    assert isinstance(packed.model.lm_head, PackedLinear) == pack
    assert packed.parameter_count == pool.parameter_count("m")
    assert packed.dtype == torch.bfloat16


@needs_bfloat16
def test_an_evicted_model_is_freed(tmp_path: Path) -> None:
    models = [
        {"name": name, "source": str(save_llama(tmp_path / name, dtype="bfloat16"))}
        for name in ("small", "large")
    ]
    pool = ModelPool.from_config({"target": "large", "models": models})
    layer = weakref.ref(pool.get("small").model.lm_head)
    assert pool.evict("small")
    gc.collect()
    assert layer() is None


def test_in_float32_only_what_is_large_is_packed() -> None:
    small, large = linear(256, 256, dtype="float32"), linear(512, 256, dtype="float32")
    model = nn.Sequential(small, large)
    assert pack_linears(model) == 1
    assert model[0] is small
    assert isinstance(model[1], PackedLinear)
