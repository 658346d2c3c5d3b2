"""There is no direct forward where a bit or a window is another one."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from modelpool.attention.kv_view import Attend
from modelpool.fast.direct_forward import DirectForward, direct_forward_of
from modelpool.fast.model_shape import ModelShape, shape_of
from modelpool.forward import ForwardOutput
from test_support.llama_models import Feeder
from tests.modelpool.fast.test_forwards import WAYS

DIRECT = WAYS["direct"]


def with_other_windows(model: PreTrainedModel, attend: Attend) -> ModelShape:
    """A shape that is the model's but for its windows."""
    shape = shape_of(model, attend)
    assert shape is not None
    layers = [replace(one, attention=replace(one.attention, window=6)) for one in shape.layers]
    return replace(shape, layers=layers)


def test_a_forward_with_one_other_bit_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, _ = DIRECT.through("qwen3", torch.float32)
    plain = DirectForward.__call__

    def nearly(self: DirectForward, *pack: Any) -> ForwardOutput:
        output = plain(self, *pack)
        logits = output.logits
        logits[0, 3] = torch.nextafter(logits[0, 3], torch.tensor(torch.inf))
        return output

    monkeypatch.setattr(DirectForward, "__call__", nearly)
    assert direct_forward_of(packed) is None


@pytest.mark.parametrize("dtype", DIRECT.tolerance, ids=str)
def test_norms_in_one_call_have_the_bits_of_those_spelled_out(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, direct = DIRECT.through("qwen3", dtype)
    monkeypatch.setattr("modelpool.fast.direct_forward._is_one_call", lambda size: False)
    shape = shape_of(packed.model, packed.attend)
    assert shape is not None
    spelled = DirectForward(packed, shape)
    expected, got = (Feeder(one, packed).feed({0: 6, 1: 1}) for one in (direct, spelled))
    assert torch.equal(got, expected)
