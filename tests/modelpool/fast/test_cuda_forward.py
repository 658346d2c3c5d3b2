"""The forward for CUDA with reference kernels, on a CPU: what the packed forward says."""

from typing import Any

import pytest
import torch

from modelpool.fast.cuda_forward import CudaForward, cuda_forward_of
from modelpool.fast.layer_reference import LayerKernels, reference_kernels
from modelpool.packed_model import PackedModel
from tests.modelpool.llama_models import (
    CHANGES,
    LLAMA_SHAPED,
    OTHERS,
    VOCAB,
    Feeder,
    feed_tree,
    make_model,
)
from tests.triton_interpreter import DEVICE, needs_triton

# Norms of transformers round to float32 in any precision. Float32 sums in an order that the CPU's
# own kernels choose: the noise that is allowed is that of the guarantees.
CLOSE = {torch.float32: 1e-4, torch.float64: 2e-5}


def on_device(model: Any) -> Any:
    return model.to(DEVICE)


def wrap(name: str, dtype: torch.dtype, kernels: LayerKernels) -> tuple[PackedModel, CudaForward]:
    packed = PackedModel.wrap("m", make_model(LLAMA_SHAPED[name](), dtype), VOCAB)
    forward = cuda_forward_of(packed, kernels)
    assert forward is not None
    return packed, forward


@pytest.mark.parametrize("dtype", CLOSE, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", LLAMA_SHAPED)
def test_packs_and_trees_give_the_logits_of_the_packed_forward(
    name: str, dtype: torch.dtype
) -> None:
    packed, forward = wrap(name, dtype, reference_kernels())
    feeders = Feeder(packed.forward, packed), Feeder(forward, packed)
    for counts in ({0: 6, 1: 6}, {0: 1, 1: 4, 2: 1, 3: 2}, {0: 3, 1: 20}, {3: 1}):
        expected, got = (feeder.feed(counts) for feeder in feeders)
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, rtol=0, atol=CLOSE[dtype])
    expected, got = feed_tree(packed.forward, packed), feed_tree(forward, packed, walks_paths=True)
    torch.testing.assert_close(got, expected, rtol=0, atol=CLOSE[dtype])


@pytest.mark.parametrize("wanted", [[], [7], [9, 2]])
def test_only_the_wanted_logits_are_computed(wanted: list[int]) -> None:
    packed, forward = wrap("llama-tied", torch.float32, reference_kernels())
    expected, got = (
        Feeder(one, packed).feed({0: 6, 2: 6}, wanted) for one in (packed.forward, forward)
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=CLOSE[torch.float32])


def test_weights_are_shared_with_the_model_which_goes_on_to_work() -> None:
    packed, forward = wrap("qwen2", torch.float32, reference_kernels())
    before = Feeder(packed.forward, packed).feed({0: 5})
    model: Any = packed.model
    model.model.layers[0].self_attn.k_proj.weight.zero_()
    changed = [Feeder(one, packed).feed({0: 5}) for one in (packed.forward, forward)]
    assert not torch.allclose(changed[0], before, atol=1e-3)
    torch.testing.assert_close(changed[0], changed[1], rtol=0, atol=CLOSE[torch.float32])


@pytest.mark.parametrize("name", OTHERS)
def test_models_of_another_shape_have_none(name: str) -> None:
    packed = PackedModel.wrap("m", make_model(OTHERS[name]()), VOCAB)
    assert cuda_forward_of(packed, reference_kernels()) is None


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_models_have_none(change: object) -> None:
    packed = PackedModel.wrap("m", make_model(LLAMA_SHAPED["llama"]()), VOCAB)
    change(packed.model)  # type: ignore[operator]
    assert cuda_forward_of(packed, reference_kernels()) is None


@needs_triton
@pytest.mark.long
@pytest.mark.parametrize("name", ["llama-biased", "mistral", "qwen3"])
def test_triton_kernels_say_what_the_reference_says(name: str) -> None:
    from modelpool.attention.path_kernels import path_attention
    from modelpool.fast.layer_kernels import gated, rotate_and_write

    config = LLAMA_SHAPED[name]()
    config.head_dim = 16  # the least of a matrix product
    config.num_hidden_layers = 1  # the interpreter is slow
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    packed = PackedModel.wrap("m", on_device(make_model(config, torch.float32)), VOCAB)
    forwards = [
        cuda_forward_of(packed, kernels)
        for kernels in (reference_kernels(), LayerKernels(rotate_and_write, path_attention, gated))
    ]
    wanted, got = (
        feed_tree(forward, packed, walks_paths=True) for forward in forwards if forward is not None
    )
    torch.testing.assert_close(got, wanted, rtol=0, atol=CLOSE[torch.float32])
