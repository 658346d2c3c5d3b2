"""Experts in MXFP4 (gpt-oss) are read as the numbers that they stand for, and counted as these."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig

from modelpool.checkpoint.footprint import read_checkpoint
from modelpool.errors import ConfigError
from tests.modelpool.compressed import declare
from tests.modelpool.factories import pool_of, save_llama, save_model
from tests.modelpool.refused import refused

FIELD = "pool.models[0]"
# What four bits stand for, the lowest of a byte first: sign, two bits of exponent, one of mantissa.
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def checkpoints(directory: Path) -> tuple[Path, Path]:
    """A gpt-oss whose experts are stored in MXFP4, and the same numbers in bfloat16."""
    plain = save_model(GptOssConfig, directory / "plain", hidden=64, dtype="bfloat16")
    stored = save_model(GptOssConfig, directory / "mxfp4", hidden=64, dtype="bfloat16")
    declare(stored, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    numbers, small = load_file(plain / "model.safetensors"), dict[str, Tensor]()
    random = torch.Generator().manual_seed(0)
    for name in [one for one in numbers if one.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = numbers[name].shape
        shape = (experts, outputs, inputs // 32, 16)
        blocks = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
        scales = torch.randint(120, 127, shape[:3], generator=random, dtype=torch.uint8)
        both = torch.stack((VALUES[(blocks & 15).int()], VALUES[(blocks >> 4).int()]), dim=-1)
        values = both.flatten(-2) * 2.0 ** (scales.float() - 127).unsqueeze(-1)
        numbers[name] = values.flatten(-2).transpose(1, 2).contiguous().bfloat16()
        small |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    small |= {name: one for name, one in numbers.items() if f"{name}_blocks" not in small}
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    save_file(small, stored / "model.safetensors", {"format": "pt"})
    return stored, plain


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_its_weights_are_those_of_the_plain_checkpoint_and_are_counted_so(
    dtype: str, tmp_path: Path
) -> None:
    stored, plain = checkpoints(tmp_path)
    pools = [pool_of(path, dtype=dtype, pack_weights=False) for path in (stored, plain)]
    loaded = [dict(pool.get("m").model.named_parameters()) for pool in pools]
    assert loaded[0].keys() == loaded[1].keys()
    assert all(torch.equal(one, loaded[1][name]) for name, one in loaded[0].items())
    footprints = [pool.plan("m").footprint for pool in pools]
    assert footprints[0] == footprints[1]
    held = sum(one.nbytes for one in loaded[0].values())
    assert abs(footprints[0].weight_bytes - held) < 0.03 * held
    assert f"are kept in {dtype}" in str(pools[0].plan("m").warning)
    assert "MXFP4" not in str(pools[1].plan("m").warning)


def test_its_linear_layers_may_be_quantised_as_of_a_plain_checkpoint(tmp_path: Path) -> None:
    stored, plain = checkpoints(tmp_path)
    facts = [read_checkpoint(path, field=FIELD) for path in (stored, plain)]
    assert facts[0].stored == "mxfp4"
    assert facts[0].int8_read_bytes == facts[1].int8_read_bytes
    assert pool_of(stored, dtype="bfloat16", weights="int8").plan("m").weights == "int8"


def test_another_class_in_mxfp4_is_refused_before_its_weights(tmp_path: Path) -> None:
    path = save_llama(tmp_path)
    declare(path, {"quant_method": "mxfp4"})
    (path / "model.safetensors").unlink()
    with refused(f"{FIELD}.source", "MXFP4, which is read of gpt-oss, not of llama", ConfigError):
        read_checkpoint(path, field=FIELD)
