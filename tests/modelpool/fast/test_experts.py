"""Experts in int8 and int4 compute what the plain ones do, each row for itself."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from modelpool import ModelPool
from modelpool.config import KeptWeights
from modelpool.fast.experts import QuantisedExperts, quantise_experts
from modelpool.fast.lean_forward import LeanForward
from modelpool.fast.linear import parameter_count
from modelpool.packed_model import PackedModel
from test_support.factories import VOCAB_SIZE, make_tokenizer, pool_of
from test_support.llama_models import make_model, shaped
from tests.modelpool.compressed import held_bytes, needs_quantised

pytestmark = needs_quantised
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss")
ROWS = 40


def experts_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    model: Any = make_model(shaped(name), dtype)
    return model.model.layers[0].mlp


@pytest.mark.parametrize(("in_int4", "most"), [(False, 0.05), (True, 0.3)])
@pytest.mark.parametrize("name", FAMILIES)
def test_experts_compute_what_the_plain_ones_do(name: str, in_int4: bool, most: float) -> None:
    mixture = experts_of(name)
    plain, count = copy.deepcopy(mixture), parameter_count(mixture)
    assert quantise_experts(mixture, in_int4) == 1
    assert parameter_count(mixture) == count
    x = torch.randn(1, ROWS, 32, generator=torch.Generator().manual_seed(0))
    expected, got = (one(x) for one in (plain, mixture))
    if isinstance(expected, tuple):
        expected, got = expected[0], got[0]
    assert 0 < (got - expected).norm() < most * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_has_the_bits_that_it_has_alone(name: str, dtype: torch.dtype) -> None:
    mixture = experts_of(name, dtype)
    quantise_experts(mixture, in_int4=False)
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 32, generator=draws).to(dtype)
    chosen = torch.rand(ROWS, 4, generator=draws).argsort(dim=1)[:, :2]
    weights = torch.rand(ROWS, 2, generator=draws).to(dtype)
    together = mixture.experts(x, chosen, weights)
    parts = [torch.split(one, 1) for one in (x, chosen, weights)]
    alone = [mixture.experts(*row) for row in zip(*parts, strict=True)]
    assert torch.equal(torch.cat(alone), together)
    swapped = mixture.experts(x, chosen.flip(1), weights.flip(1))
    assert torch.equal(swapped, together)


def test_a_number_beyond_the_experts_is_of_none() -> None:
    mixture = experts_of("qwen3_moe")
    quantise_experts(mixture, in_int4=False)
    x, weights = torch.ones(1, 32), torch.ones(1, 2)
    one = mixture.experts(x, torch.tensor([[1, 4]]), weights)
    assert torch.equal(one, mixture.experts(x, torch.tensor([[1]]), weights[:, :1]))


def loaded(config: Any, path: Path, weights: KeptWeights) -> tuple[ModelPool, PackedModel]:
    make_model(config, torch.bfloat16).save_pretrained(str(path))
    make_tokenizer(path)
    pool = pool_of(path, weights=weights)
    return pool, pool.get("m")


@pytest.mark.parametrize(
    ("name", "weights"), [("qwen3_moe", "int8"), ("mixtral", "int4"), ("gpt_oss", "int4")]
)
def test_a_pool_counts_what_they_take(name: str, weights: KeptWeights, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 256}
    config = shaped(name, vocab_size=VOCAB_SIZE, **sizes)
    pool, packed = loaded(config, tmp_path, weights)
    experts = [each for each in packed.model.modules() if isinstance(each, QuantisedExperts)]
    assert len(experts) == config.num_hidden_layers
    assert isinstance(packed.shortcut, LeanForward)
    found = held_bytes(packed)
    assert pool.plan("m").footprint.weight_bytes == pytest.approx(found, rel=0.03)
    assert pool.parameter_count("m") == packed.parameter_count
