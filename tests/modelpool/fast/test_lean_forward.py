"""The lean forward says what a model's own says, and exists for Llama-shaped decoders only."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig

from modelpool.fast.lean_forward import LeanForward, check, lean_forward_of
from modelpool.fast.linear import can_pack
from modelpool.fast.tuning import Tuning
from modelpool.packed_model import PackedModel
from tests.modelpool.llama_models import (
    CHANGES,
    LLAMA_SHAPED,
    OTHERS,
    SHAPE,
    VOCAB,
    Feeder,
    feed_tree,
    make_model,
    texts,
)


def wrap(
    config: PreTrainedConfig, dtype: torch.dtype = torch.float64, tuning: Tuning | None = None
) -> tuple[PackedModel, LeanForward]:
    packed = PackedModel.wrap("m", make_model(config, dtype), VOCAB, tuning or Tuning())
    lean = lean_forward_of(packed)
    assert lean is not None
    return packed, lean


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", LLAMA_SHAPED)
def test_packs_give_the_logits_of_the_ordinary_forward(name: str, dtype: torch.dtype) -> None:
    ordinary = make_model(LLAMA_SHAPED[name](), dtype)
    packed, lean = wrap(LLAMA_SHAPED[name](), dtype)
    feeder = Feeder(lean, packed)
    with torch.inference_mode():
        wanted = ordinary(texts(4)).logits[:, :, :VOCAB]
    got: dict[int, list[Tensor]] = {row: [] for row in range(4)}
    # One group as it stands; one with idle places; one with an idle row; a long row alone.
    for counts in (
        dict.fromkeys(range(4), 6),
        {0: 1, 1: 4, 2: 1, 3: 2},
        {0: 2, 2: 2},
        {0: 3, 1: 20},
        {3: 1},
    ):
        logits = torch.split(feeder.feed(counts), [counts[row] for row in sorted(counts)])
        for row, part in zip(sorted(counts), logits, strict=True):
            got[row].append(part)
    # In float64 transformers' norms still round to float32.
    tolerance = 1e-4 if dtype == torch.float64 else 5e-3
    for row in range(4):
        ours = torch.cat(got[row])
        torch.testing.assert_close(ours, wanted[row, : len(ours)], atol=tolerance, rtol=0.0)


@pytest.mark.parametrize("name", LLAMA_SHAPED)
def test_token_trees_give_the_logits_of_the_packed_forward(name: str) -> None:
    packed, lean = wrap(LLAMA_SHAPED[name]())
    expected, got = (feed_tree(forward, packed) for forward in (packed.forward, lean))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("wanted", [[], [7], [9, 2]])
def test_only_the_wanted_logits_are_computed(wanted: list[int]) -> None:
    packed, lean = wrap(LLAMA_SHAPED["llama-tied"]())
    everything = Feeder(lean, packed).feed({0: 6, 2: 6})
    some = Feeder(lean, packed).feed({0: 6, 2: 6}, wanted)
    torch.testing.assert_close(some, everything[wanted], atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_have_no_lean_forward(name: str) -> None:
    assert LeanForward.build(make_model(OTHERS[name]()), VOCAB) is None


@pytest.mark.parametrize("change", CHANGES)
def test_changed_modules_have_no_lean_forward(change: Callable[[Any], None]) -> None:
    model = make_model(LLAMA_SHAPED["llama"]())
    assert LeanForward.build(model, VOCAB) is not None
    change(model)
    assert LeanForward.build(model, VOCAB) is None


def test_a_lean_forward_that_says_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed, lean = wrap(LLAMA_SHAPED["qwen2-windows"]())
    with torch.inference_mode():
        assert check(packed, lean) is None
        monkeypatch.setattr(lean, "_rotations", lean._rotations.flip(1))
        assert "its logits differ" in str(check(packed, lean))
    monkeypatch.setattr("modelpool.fast.lean_forward.attention_window", lambda *_: 6)
    assert lean_forward_of(packed) is None


def test_plain_weights_are_shared_with_the_model() -> None:
    packed, lean = wrap(LLAMA_SHAPED["llama"]())
    attention: Any = packed.model.model.layers[0].self_attn
    whole = attention.q_proj.weight.untyped_storage().data_ptr()
    assert attention.k_proj.weight.untyped_storage().data_ptr() == whole
    lean.release()
    got, wanted = (Feeder(forward, packed).feed({0: 6}) for forward in (lean, packed.forward))
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0.0)


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="oneDNN without bfloat16")
@pytest.mark.parametrize("first", [False, True], ids=["plain", "packed before"])
@pytest.mark.parametrize("name", ["llama-tied", "llama-biased", "qwen2", "qwen3"])
def test_bfloat16_is_packed_and_its_plain_weights_can_be_freed(name: str, first: bool) -> None:
    packed, lean = wrap(LLAMA_SHAPED[name](), torch.bfloat16, Tuning(pack_weights=first))
    wanted = Feeder(packed.forward, packed).feed({0: 6, 1: 6}).double()
    lean.release()
    layer: Any = packed.model.model.layers[0]
    assert layer.self_attn.q_proj.weight.is_meta
    got = Feeder(lean, packed).feed({0: 6, 1: 6}).double()
    assert (got - wanted).abs().mean() < 0.1 * wanted.std()
    assert Feeder(lean, packed).feed({0: 6}, []).shape == (0, VOCAB)


@pytest.mark.skipif(not can_pack(torch.float32), reason="torch without oneDNN")
def test_large_float32_weights_are_packed() -> None:
    shape = {**SHAPE, "hidden_size": 256, "intermediate_size": 512}
    packed, lean = wrap(LlamaConfig(**shape), torch.float32, Tuning(lean=True))
    wanted = Feeder(packed.forward, packed).feed({0: 12})
    lean.release()
    down: Any = packed.model.model.layers[0].mlp.down_proj
    assert down.weight.is_meta
    got = Feeder(lean, packed).feed({0: 12})
    assert (got - wanted).abs().mean() < 1e-4 * wanted.std()
