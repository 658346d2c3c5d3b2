"""What a wrapped model has, how it is run, and what of its attention is refused."""

from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from modelpool.attention.backend import PATH
from modelpool.attention.packed import OpaqueView, packed_attention_forward
from modelpool.errors import UnsupportedAttention
from modelpool.fast.tuning import Tuning
from modelpool.packed_model import PackedModel
from statemgr import ModelState
from test_support.llama_models import LLAMA_SHAPED, SHAPE, make_model

VOCAB = SHAPE["vocab_size"]
LLAMA = LLAMA_SHAPED["llama"]


def test_a_wrapped_model_tells_the_shapes_of_its_cache() -> None:
    model = PackedModel.wrap("llama", make_model(LLAMA(), torch.float32), VOCAB)
    assert [(k.kv_heads, k.head_dim, k.dtype) for k in model.kv_layers.values()] == [
        (2, 8, torch.float32)
    ] * 3
    assert model.kv_bytes_per_token == 3 * 2 * 2 * 8 * 4
    assert model.max_positions == 128
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)
    assert model.parameter_count == sum(p.numel() for p in model.model.parameters())


class _Attention(nn.Module):
    layer_idx = 0


def attend(mask: Tensor | None = None, **asked: Any) -> None:
    part = torch.zeros(1, 1, 1, 4)
    packed_attention_forward(_Attention(), part, part, part, mask, **asked)


def test_masks_dropout_and_forwards_outside_the_engine_are_refused() -> None:
    model = PackedModel.wrap("llama", make_model(LLAMA()), VOCAB)
    state, one, zero = ModelState(model.kv_layers, 1, 128), np.array([1]), np.array([0])
    slots = state.append(zero, one, zero, zero)
    view = OpaqueView(state.view(zero, one, zero, slots), PATH.load())
    with pytest.raises(UnsupportedAttention, match="a mask of its own"):
        attend(mask=torch.zeros(1), packed_kv=view)
    with pytest.raises(UnsupportedAttention, match="dropout"):
        attend(dropout=0.1, packed_kv=view)
    with pytest.raises(UnsupportedAttention, match="no view of keys and values"):
        model.model(input_ids=torch.zeros(1, 2, dtype=torch.int64))


@pytest.mark.parametrize("fails", [False, True])
def test_a_forward_has_its_own_number_of_threads(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = PackedModel.wrap("m", make_model(LLAMA()), VOCAB, Tuning(threads=3))
    assert packed.threads == 3
    before, seen = torch.get_num_threads(), []

    def forward(*_: object) -> Tensor:
        seen.append(torch.get_num_threads())
        if fails:
            raise RuntimeError("out of memory")
        return torch.zeros(1)

    monkeypatch.setattr(packed, "_forward", forward)
    unused, view = torch.zeros(1, dtype=torch.int64), MagicMock()
    with pytest.raises(RuntimeError) if fails else nullcontext():
        packed.forward(unused, unused, view, unused)
    assert seen == [3]
    assert torch.get_num_threads() == before


def test_out_of_memory_is_no_reason_to_refuse_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(LLAMA())

    def forward(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(model, "forward", forward)
    with pytest.raises(torch.OutOfMemoryError):
        PackedModel.wrap("m", model, VOCAB)


@pytest.mark.parametrize("is_spread", [False, True])
def test_the_index_of_wanted_logits_fits_whatever_device_a_spread_model_picks_them_on(
    is_spread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(LLAMA())
    if is_spread:
        model.model.layers[1].to("meta")
    packed = PackedModel("m", model, VOCAB, 128, {})
    asked: dict[str, Any] = {}
    monkeypatch.setattr(model, "forward", lambda **given: asked.update(given) or MagicMock())
    index = MagicMock()
    packed.forward(torch.zeros(1), torch.zeros(1), MagicMock(attended=1.0), index)
    assert asked["logits_to_keep"] is (index.cpu() if is_spread else index)
