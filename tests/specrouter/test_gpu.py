"""On an accelerator: the same promise as on the CPU. Skipped where there is none."""

import copy
from typing import Any

import pytest
import torch

from specrouter import ChainRouter, SamplingParams, Speculation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]


def on(config: dict[str, Any], *devices: str) -> dict[str, Any]:
    """The configuration with its models on these devices, weakest first."""
    placed = copy.deepcopy(config)
    for model, device in zip(placed["pool"]["models"], devices, strict=True):
        model["device"] = device
    return placed


@pytest.mark.parametrize(
    "devices", [("cuda:0",) * 3, ("cpu", "cuda:0", "cuda:0")], ids=["all", "drafter on the CPU"]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_chains_on_an_accelerator_change_no_token(
    small_config: dict[str, Any], devices: tuple[str, ...], temperature: float
) -> None:
    params = [
        SamplingParams(max_new_tokens=24, temperature=temperature, seed=seed)
        for seed in range(len(PROMPTS))
    ]
    with ChainRouter.from_config(on(small_config, *devices)) as router:
        names = router.pool.names
        alone = router.generate(PROMPTS, params, "off")
        for chain in ((names[0], names[-1]), names):
            routed = router.generate(PROMPTS, params, Speculation(chain, depth=4))
            assert [o.token_ids for o in routed] == [o.token_ids for o in alone]
        router.instruments.check_integrity()
    with ChainRouter.from_config(on(small_config, "cpu", "cpu", "cpu")) as router:
        on_cpu = router.generate(PROMPTS, params, "off")
    assert [o.token_ids for o in on_cpu] == [o.token_ids for o in alone]
