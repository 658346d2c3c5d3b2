"""Cosines and sines: the nearest float32, and the same bits wherever they are computed."""

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from modelpool.fast.rotation import (
    _FIRST_POSITIONS,
    OwnFrequencies,
    Rotation,
    angles_of,
    rotation_table,
)
from modelpool.fast.trigonometry import cosine, sine

ANGLES = torch.arange(4096, dtype=torch.float32)[:, None] / 10_000 ** (torch.arange(32) / 32)


def test_results_are_the_nearest_float32() -> None:
    wide = ANGLES.double()
    assert torch.equal(cosine(ANGLES), wide.cos().float())
    assert torch.equal(sine(ANGLES), wide.sin().float())


@given(st.floats(-1_500_000, 1_500_000))
def test_float64_is_precise_to_its_last_bits(angle: float) -> None:
    angles = torch.tensor([angle], dtype=torch.float64)
    assert abs(cosine(angles) - angles.cos()).item() < 5e-16
    assert abs(sine(angles) - angles.sin()).item() < 5e-16


def test_bits_are_those_of_every_other_cpu() -> None:
    angles = torch.arange(-50_000, 50_000) * 1.999  # a product is the same everywhere
    digests = [
        hashlib.sha256(one(angles).numpy().tobytes()).hexdigest()[:16] for one in (cosine, sine)
    ]
    assert digests == ["c8ae9f7d75f207a1", "8b9f7dbdee2dc3f8"]


@pytest.mark.parametrize(("theta", "size"), [(1e6, 128), (1e4, 96), (130_000.0, 96)])
def test_frequencies_are_float64s_rounded_once(theta: float, size: int) -> None:
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    with OwnFrequencies():
        found = theta**exponents
    wide = theta ** exponents.double()
    assert (found.double() - wide).abs().max() <= 2.0**-24 * wide.max()
    assert found.tolist() == torch.tensor([theta**one for one in exponents.tolist()]).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_models_rotation_takes_them(dtype: torch.dtype) -> None:
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, max_position_embeddings=4096)
    rotary = LlamaRotaryEmbedding(config)
    rotation = Rotation(False, False, "own", 64)
    found = rotation_table(rotation, rotary, torch.empty(1, dtype=dtype), 4096)
    angles = torch.arange(4096, dtype=torch.float32)[:, None] * rotary.inv_freq
    assert torch.equal(found[:, 0, 0, :32], cosine(angles).to(dtype))
    assert torch.equal(found[:, 1, 0, 32:], sine(angles).to(dtype))


def test_a_table_grows_with_the_positions_and_has_the_same_bits() -> None:
    longest = 3 * _FIRST_POSITIONS
    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=4))
    rotation, like = Rotation(False, False, "own", 16), torch.empty(1)
    whole = rotation_table(rotation, rotary, like, longest)
    angles = angles_of(rotation, rotary, like, longest)
    for index in ([0, 5], [_FIRST_POSITIONS + 7, 3], [longest - 1], [1]):
        places = torch.tensor(index)
        for found, wanted in zip(angles(places), whole[places].unbind(1), strict=True):
            assert torch.equal(found, wanted)
