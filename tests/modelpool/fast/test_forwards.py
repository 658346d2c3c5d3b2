"""Short ways through decoders of a known shape say what the packed forward says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from modelpool.fast.cuda_forward import cuda_forward_of
from modelpool.fast.direct_forward import direct_forward_of
from modelpool.fast.lean_forward import lean_forward_of
from modelpool.fast.model_shape import LayerShape, ModelShape, shape_of
from modelpool.fast.tuning import PLAIN, Tuning
from modelpool.forward import Forward
from modelpool.packed_model import PackedModel
from test_support.llama_models import (
    LLAMA_SHAPED,
    OTHERS,
    PACKS,
    SHAPED,
    VOCAB,
    Feeder,
    feed_tree,
    make_model,
    reference_kernels,
    shaped,
)


@dataclass(frozen=True)
class Way:
    """`tolerance`: of logits, by dtype; 0: to the bit. transformers' norms round to float32 in any
    dtype. Float32 sums in an order that the CPU's own kernels choose."""

    find: Callable[[PackedModel], Forward | None]
    tolerance: dict[torch.dtype, float]
    tuning: Tuning = PLAIN

    def through(self, name: str, dtype: torch.dtype) -> tuple[PackedModel, Forward]:
        config = LLAMA_SHAPED[name]() if name in LLAMA_SHAPED else shaped(name)
        model = make_model(config, dtype)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SHAPED)
def test_other_shapes_have_a_direct_forward_to_the_bit_and_a_lean_one(
    name: str, dtype: torch.dtype
) -> None:
    packed, direct = WAYS["direct"].through(name, dtype)
    expected, got, lean = (
        torch.cat([*Feeder(forward, packed).feed_all(PACKS).values(), feed_tree(forward, packed)])
        for forward in (packed.forward, direct, lean_way(packed))
    )
    assert torch.equal(got, expected)
    known = shape(packed)
    assert known is not None
    assert known.is_llama == (name in ("ministral", "llama-by-length", "seed_oss"))
    difference = (lean - expected).double().abs().mean() / expected.double().std()
    assert difference < (1e-4 if dtype == torch.float32 else 0.1)


def lean_way(packed: PackedModel) -> Forward:
    forward = lean_forward_of(packed)
    assert forward is not None
    return forward


def layers(packed: PackedModel) -> Sequence[LayerShape]:
    found = shape(packed)
    assert found is not None
    return found.layers


def shape(packed: PackedModel) -> ModelShape | None:
    return shape_of(packed.model, packed.attend)


@pytest.mark.parametrize("way", ["direct", "lean"])
@pytest.mark.parametrize("name", ["olmo", "olmoe"])
def test_clipping_that_no_short_text_reaches_has_no_known_shape(name: str, way: str) -> None:
    packed = PackedModel.wrap("m", make_model(shaped(name)), VOCAB)
    assert shape(packed) is not None
    packed = PackedModel.wrap("m", make_model(shaped(name, clip_qkv=40.0)), VOCAB)
    assert WAYS[way].find(packed) is None


@pytest.mark.parametrize("part", ["logits", "output of attention"])
def test_what_clips_elsewhere_has_no_known_shape(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind: Any = LlamaForCausalLM if part == "logits" else LlamaAttention
    plain = kind.forward

    def clipping(self: Any, *args: Any, **options: Any) -> Any:
        output = plain(self, *args, **options)
        if part == "logits":
            output.logits = output.logits.clamp(-50.0, 50.0)
            return output
        return output[0].clamp(-50.0, 50.0), output[1]

    packed = PackedModel.wrap("m", make_model(LLAMA_SHAPED["llama"]()), VOCAB)
    assert shape(packed) is not None
    monkeypatch.setattr(kind, "forward", clipping)
    assert shape(packed) is None


@pytest.mark.parametrize("way", WAYS)
def test_a_model_whose_code_fails_keeps_its_ordinary_forward(
    way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> Any:
        raise AttributeError("no rope_parameters")

    packed = PackedModel.wrap("m", make_model(LLAMA_SHAPED["llama"]()), VOCAB)
    monkeypatch.setattr("modelpool.fast.model_shape.candidates", fails)
    with caplog.at_level("INFO"):
        assert WAYS[way].find(packed) is None
    expected = "m keeps its ordinary forward: AttributeError: no rope_parameters"
    assert caplog.messages == [expected]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OTHERS)
def test_there_is_no_short_way_through_an_unknown_shape(name: str, way: str) -> None:
    packed = PackedModel.wrap("m", make_model(OTHERS[name]()), VOCAB)
    assert WAYS[way].find(packed) is None
