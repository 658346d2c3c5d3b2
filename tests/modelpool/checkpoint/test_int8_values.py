"""Weights in int8 as checkpoints hold them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from modelpool.checkpoint.int8_values import Int8Values, read_int8
from test_support.factories import pool_of, save_llama
from tests.modelpool.compressed import compress
from tests.modelpool.refused import refused

FIELD = "pool.models[0]"


def test_values_are_the_nearest_and_a_channel_of_zeros_stays_one() -> None:
    weight = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    weight[2] = 0
    values = Int8Values.of(weight)
    assert values.levels.dtype == torch.int8
    assert ((values.plain() - weight).abs() <= values.scales.unsqueeze(1) * 0.5001).all()
    assert (values.levels.abs().amax(1) == 127).sum() == 5
    assert not values.plain()[2].any()


def test_what_is_read_is_what_was_written_and_its_product(tmp_path: Path) -> None:
    tensors = compress(save_llama(tmp_path, dtype="bfloat16"))
    plain, quantised = read_int8(tmp_path)
    assert set(plain) == {name for name in tensors if not name.endswith("_scale")}
    for layer, values in quantised.items():
        assert torch.equal(values.levels, tensors[f"{layer}.weight"])
        product = values.levels.float() * tensors[f"{layer}.weight_scale"].float()
        assert torch.equal(plain[f"{layer}.weight"], product.bfloat16())


@pytest.mark.parametrize("harm", ["scale", "shape", "zero point", "alone", "stranger"])
def test_damaged_levels_are_refused(harm: str, tmp_path: Path) -> None:
    tensors = compress(save_llama(tmp_path, dtype="bfloat16"))
    layer = "model.layers.0.mlp.up_proj"
    if harm == "scale":
        tensors[f"{layer}.weight_scale"] = torch.ones(3, 1)
    elif harm == "shape":
        tensors[f"{layer}.weight"] = tensors[f"{layer}.weight"].flatten()
    elif harm == "zero point":
        tensors[f"{layer}.weight_zero_point"] = torch.ones(48, 1, dtype=torch.int8)
    elif harm == "alone":
        del tensors[f"{layer}.weight_scale"]
    else:
        tensors["model.layers.9.up.weight"] = tensors[f"{layer}.weight"].clone()
        scale = tensors[f"{layer}.weight_scale"].clone()
        tensors["model.layers.9.up.weight_scale"] = scale
    save_file(tensors, tmp_path / "model.safetensors")
    pool = pool_of(tmp_path)
    with refused(f"{FIELD}.source"):
        pool.get("m")
