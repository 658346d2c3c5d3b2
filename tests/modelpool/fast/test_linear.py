"""Packed linear layers say what plain ones say, and nothing keeps the plain weights alive."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

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


@needs_bfloat16
@pytest.mark.parametrize("pack", [True, False])
def test_a_pool_packs_what_it_loads_unless_told_not_to(pack: bool, tmp_path: Path) -> None:
    path = save_llama(tmp_path, dtype="bfloat16")
    pool = pool_of(path, pack_weights=pack)
    packed = pool.get("m")
    assert isinstance(packed.model.lm_head, PackedLinear) == pack
    assert packed.parameter_count == pool.parameter_count("m")
    assert packed.dtype == torch.bfloat16
