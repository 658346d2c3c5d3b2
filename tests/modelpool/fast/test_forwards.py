"""Short ways through Llama-shaped decoders say what the packed forward says, or do not exist."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from modelpool.fast.cuda_forward import cuda_forward_of
from modelpool.fast.direct_forward import direct_forward_of
from modelpool.fast.layer_reference import reference_kernels
from modelpool.fast.lean_forward import lean_forward_of
from modelpool.fast.llama_shape import is_llama_shaped
from modelpool.fast.tuning import PLAIN, Tuning
from modelpool.forward import Forward
from modelpool.packed_model import PackedModel
from tests.modelpool.llama_models import (
    CHANGES,
    LLAMA_SHAPED,
    OTHERS,
    PACKS,
    VOCAB,
    Feeder,
    feed_tree,
    make_model,
)


@dataclass(frozen=True)
class Way:
    """`tolerance`: of logits, by dtype; 0: to the bit. transformers' norms round to float32 in any
    dtype. Float32 sums in an order that the CPU's own kernels choose."""

    find: Callable[[PackedModel], Forward | None]
    tolerance: dict[torch.dtype, float]
    tuning: Tuning = PLAIN

    def through(self, name: str, dtype: torch.dtype) -> tuple[PackedModel, Forward]:
        model = make_model(LLAMA_SHAPED[name](), dtype)
        packed = PackedModel.wrap("m", model, VOCAB, self.tuning)
        forward = self.find(packed)
        assert forward is not None
        return packed, forward


WAYS = {
    "direct": Way(
        direct_forward_of,
        {torch.float32: 0, torch.float64: 0, torch.bfloat16: 0},
        Tuning(pack_weights=True),
    ),
    "lean": Way(lean_forward_of, {torch.float32: 5e-3, torch.float64: 1e-4}),
    "cuda": Way(
        lambda packed: cuda_forward_of(packed, reference_kernels()),
        {torch.float32: 1e-4, torch.float64: 2e-5},
    ),
}
CASES = [(way, dtype) for way, one in WAYS.items() for dtype in one.tolerance]


def assert_says(got: Tensor, expected: Tensor, tolerance: float) -> None:
    assert got.dtype == expected.dtype
    if tolerance:
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
    else:
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("way", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("name", LLAMA_SHAPED)
def test_packs_and_trees_give_the_logits_of_the_packed_forward(
    name: str, way: str, dtype: torch.dtype
) -> None:
    one = WAYS[way]
    packed, forward = one.through(name, dtype)
    feeders = Feeder(packed.forward, packed), Feeder(forward, packed)
    for counts in PACKS:
        expected, got = (feeder.feed(counts) for feeder in feeders)
        assert_says(got, expected, one.tolerance[dtype])
    expected = feed_tree(packed.forward, packed)
    got = feed_tree(forward, packed)
    assert_says(got, expected, one.tolerance[dtype])


@pytest.mark.parametrize("name", LLAMA_SHAPED)
def test_the_packed_forward_gives_the_logits_of_the_ordinary_one(name: str) -> None:
    ordinary = make_model(LLAMA_SHAPED[name]())
    packed = PackedModel.wrap("m", make_model(LLAMA_SHAPED[name]()), VOCAB)
    feeder = Feeder(packed.forward, packed)
    with torch.inference_mode():
        wanted = ordinary(feeder.texts).logits[:, :, :VOCAB]
    for row, got in feeder.feed_all(PACKS).items():
        torch.testing.assert_close(got, wanted[row, : len(got)], atol=1e-4, rtol=0)


@pytest.mark.parametrize("wanted", [[], [7], [9, 2]])
@pytest.mark.parametrize("way", WAYS)
def test_only_the_wanted_logits_are_computed(way: str, wanted: list[int]) -> None:
    packed, forward = WAYS[way].through("llama-tied", torch.float64)
    expected, got = (
        Feeder(one, packed).feed({0: 6, 2: 6}, wanted) for one in (packed.forward, forward)
    )
    assert_says(got, expected, WAYS[way].tolerance[torch.float64])


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_are_not_llama_shaped(name: str) -> None:
    assert not is_llama_shaped(make_model(OTHERS[name]()))


@pytest.mark.parametrize("change", CHANGES)
def test_changed_modules_are_not_llama_shaped(change: Callable[[Any], None]) -> None:
    model = make_model(LLAMA_SHAPED["llama"]())
    assert is_llama_shaped(model)
    change(model)
    assert not is_llama_shaped(model)


@pytest.mark.parametrize("way", WAYS)
def test_there_is_no_short_way_through_what_is_not_llama_shaped(way: str) -> None:
    packed = PackedModel.wrap("m", make_model(OTHERS["phi"]()), VOCAB)
    assert WAYS[way].find(packed) is None
