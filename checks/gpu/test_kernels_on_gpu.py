"""What only a GPU can show: real bits, graphs, texts by kernels. Skipped where there is none."""

from typing import Any

import pytest
import torch
import yaml

from modelpool.fast.cuda_forward import CudaForward
from modelpool.fast.graph_runner import CudaGraphs
from modelpool.packed_model import PackedModel
from specrouter import ChainRouter, SamplingParams, Speculation
from specrouter.cli.arguments import default_config
from test_support.llama_models import LLAMA_SHAPED, VOCAB, Feeder, feed_tree, make_model
from test_support.triton_interpreter import DEVICE, needs_triton

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    needs_triton,
]
DTYPES = [torch.float32, torch.bfloat16]


def forwards(
    name: str, dtype: torch.dtype, device: str | torch.device = DEVICE
) -> tuple[PackedModel, CudaForward, CudaForward]:
    """A model, its forward run eagerly, and as graphs."""
    from modelpool.fast.layer_kernels import triton_kernels

    config = LLAMA_SHAPED[name]()
    config.head_dim = 16
    model: Any = make_model(config, dtype)
    packed = PackedModel.wrap("m", model.to(device), VOCAB)
    kernels = triton_kernels()
    return (
        packed,
        CudaForward(packed, kernels),
        CudaForward(packed, kernels, CudaGraphs(packed.device)),
    )


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen2-windows", "qwen3"])
def test_graphs_have_the_bits_of_eager_forwards(name: str, dtype: torch.dtype, device: int) -> None:
    """Also on a device that is not the current one."""
    if device >= torch.cuda.device_count():
        pytest.skip("needs a second device")
    packed, eager, graphed = forwards(name, dtype, f"cuda:{device}")
    feeders = Feeder(eager, packed), Feeder(graphed, packed)
    for counts in ({0: 6, 1: 6}, {0: 1, 1: 1, 2: 5}, {0: 1, 1: 1, 2: 3}, {0: 2, 3: 4}):
        wanted, got = (feeder.feed(counts) for feeder in feeders)
        assert torch.equal(got, wanted)
    trees = [feed_tree(one, packed) for one in (eager, graphed)]  # in other arenas
    assert torch.equal(trees[0], trees[1])
    assert graphed.sizes, "a capture failed"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_bits_that_it_has_alone(dtype: torch.dtype) -> None:
    """If this fails, matrix products give rows other bits by what stands beside them."""
    packed, eager, _ = forwards("llama", dtype)
    together = Feeder(eager, packed)
    alone = Feeder(eager, packed)
    for counts in ({0: 7, 1: 3, 2: 1}, {0: 1, 1: 9, 2: 4}, {0: 3, 1: 1, 2: 20}):
        got = together.feed(counts)[: counts[0]]
        assert torch.equal(got, alone.feed({0: counts[0]}))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_chains_of_the_bundled_family_change_no_token(temperature: float) -> None:
    config: dict[str, Any] = yaml.safe_load(default_config().read_text())
    config["pool"]["attention"] = "triton"
    for model in config["pool"]["models"]:
        if model["source"] != "suffix":
            model |= {"device": "cuda", "dtype": "float32"}
    prompts = ["The quick brown fox", "def fib(n):", "One and one is"]
    params = [
        SamplingParams(max_new_tokens=48, temperature=temperature, seed=seed)
        for seed in range(len(prompts))
    ]
    with ChainRouter.from_config(config) as router:
        alone = router.generate(prompts, params, "off")
        names = list(router.pool.models)
        for width in (1, 3):
            speculation = Speculation((names[0], names[-1]), depth=4, width=width)
            routed = router.generate(prompts, params, speculation)
            assert [one.token_ids for one in routed] == [one.token_ids for one in alone]
        router.instruments.check_integrity()
