"""Experts in MXFP4 (gpt-oss) are read as the numbers that they stand for, and counted as these."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig

from test_support.factories import save_model
from tests.modelpool.checkpoint.packers import check_same
from tests.modelpool.compressed import declare

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
    check_same(*checkpoints(tmp_path), dtype)
