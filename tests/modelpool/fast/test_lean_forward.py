"""The lean forward says what a model's own says, and exists for known shapes only."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from modelpool.attention.kv_view import Attend
from modelpool.fast.direct_forward import direct_forward_of
from modelpool.fast.lean_forward import LeanForward, check, lean_forward_of
from modelpool.fast.linear import can_pack
from modelpool.fast.model_shape import ModelShape, shape_of
from modelpool.fast.tuning import Tuning
from modelpool.packed_model import PackedModel
from test_support.llama_models import LLAMA_SHAPED, VOCAB, Feeder, make_model, shaped
from tests.modelpool.compressed import needs_quantised
from tests.modelpool.fast.test_direct_forward import with_other_windows


def wrap(
    config: PreTrainedConfig, dtype: torch.dtype = torch.float64, tuning: Tuning | None = None
) -> tuple[PackedModel, LeanForward]:
    packed = PackedModel.wrap("m", make_model(config, dtype), VOCAB, tuning or Tuning())
    lean = lean_forward_of(packed)
    assert lean is not None
    return packed, lean


def test_a_lean_forward_that_says_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed, lean = wrap(LLAMA_SHAPED["qwen2-windows"]())
    with torch.inference_mode():
        assert check(packed, lean) is None
        (angles,) = lean._angles
        monkeypatch.setattr(lean, "_angles", [lambda positions: angles(positions)[::-1]])
        assert "its logits differ" in str(check(packed, lean))
    monkeypatch.setattr("modelpool.fast.lean_forward.shape_of", with_other_windows)
    assert lean_forward_of(packed) is None


@needs_quantised
def test_quantised_layers_run_lean_only_by_a_shape_whose_bits_were_the_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nearly(model: PreTrainedModel, attend: Attend) -> ModelShape:
        shape = shape_of(model, attend)
        assert shape is not None
        return replace(shape, layers=[replace(one, multiplier=0.51) for one in shape.layers])

    def loaded() -> PackedModel:
        packed = PackedModel.wrap("m", make_model(shaped("granite"), torch.float32), VOCAB)
        packed.quantise_weights()
        direct_forward_of(packed)
        return packed

    assert lean_forward_of(loaded()) is not None
    monkeypatch.setattr("modelpool.fast.direct_forward.shape_of", nearly)
    monkeypatch.setattr("modelpool.fast.lean_forward.shape_of", nearly)
    assert lean_forward_of(loaded()) is None


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="oneDNN without bfloat16")
@pytest.mark.parametrize("first", [False, True], ids=["plain", "packed before"])
@pytest.mark.parametrize("name", ["llama-tied", "qwen2"])
def test_bfloat16_is_packed_and_its_plain_weights_can_be_freed(name: str, first: bool) -> None:
    packed, lean = wrap(LLAMA_SHAPED[name](), torch.bfloat16, Tuning(pack_weights=first))
    wanted = Feeder(packed.forward, packed).feed({0: 6, 1: 6}).double()
    lean.release()
    layer: Any = packed.model.model.layers[0]
    assert layer.self_attn.q_proj.weight.is_meta
    got = Feeder(lean, packed).feed({0: 6, 1: 6}).double()
    assert (got - wanted).abs().mean() < 0.1 * wanted.std()
    assert Feeder(lean, packed).feed({0: 6}, []).shape == (0, VOCAB)
