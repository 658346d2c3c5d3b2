"""The forward for CUDA shares its weights; its kernels say what the reference says."""

from typing import Any

import pytest
import torch

from modelpool.fast.cuda_forward import cuda_forward_of
from modelpool.packed_model import PackedModel
from test_support.llama_models import (
    LLAMA_SHAPED,
    VOCAB,
    Feeder,
    feed_tree,
    make_model,
    reference_kernels,
)
from test_support.triton_interpreter import DEVICE, needs_triton
from tests.modelpool.fast.test_forwards import WAYS

CLOSE = WAYS["cuda"].tolerance[torch.float32]


def test_weights_are_shared_with_the_model_which_goes_on_to_work() -> None:
    packed, forward = WAYS["cuda"].through("qwen2", torch.float32)
    before = Feeder(packed.forward, packed).feed({0: 5})
    model: Any = packed.model
    model.model.layers[0].self_attn.k_proj.weight.zero_()
    changed = [Feeder(one, packed).feed({0: 5}) for one in (packed.forward, forward)]
    assert not torch.allclose(changed[0], before, atol=1e-3)
    torch.testing.assert_close(changed[0], changed[1], rtol=0, atol=CLOSE)


@needs_triton
@pytest.mark.long
@pytest.mark.parametrize("name", ["llama-biased", "mistral", "qwen3"])
def test_triton_kernels_say_what_the_reference_says(name: str) -> None:
    from modelpool.fast.layer_kernels import triton_kernels

    config = LLAMA_SHAPED[name]()
    config.head_dim = 16  # the least of a matrix product
    config.num_hidden_layers = 1  # the interpreter is slow
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    model: Any = make_model(config, torch.float32)
    packed = PackedModel.wrap("m", model.to(DEVICE), VOCAB)
    both = reference_kernels(), triton_kernels()
    forwards = [cuda_forward_of(packed, kernels) for kernels in both]
    wanted, got = (feed_tree(forward, packed) for forward in forwards if forward is not None)
    torch.testing.assert_close(got, wanted, rtol=0, atol=CLOSE)
