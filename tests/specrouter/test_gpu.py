"""On an accelerator: the same promise as on the CPU. Skipped where there is none."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch

from specrouter import ChainRouter, SamplingParams, Speculation
from specrouter.execution.cycle_drafting import CycleDrafting

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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_on_another_device_drafts_while_the_target_verifies(
    small_config: dict[str, Any], temperature: float
) -> None:
    """On a second accelerator, where there is one; else on the CPU."""
    other = "cuda:1" if torch.cuda.device_count() > 1 else "cpu"
    config = on(small_config, other, other, "cuda:0")
    config["engine"] |= {"overlap_drafting": True}
    params = [
        SamplingParams(max_new_tokens=24, temperature=temperature, seed=seed)
        for seed in range(len(PROMPTS))
    ]
    seen: list[int] = []
    turns = CycleDrafting.turns

    def noting(own: CycleDrafting, plan: Any) -> Any:
        found = turns(own, plan)
        seen.append(len(found))
        return found

    with (
        mock.patch.object(CycleDrafting, "turns", noting),
        ChainRouter.from_config(config) as router,
    ):
        alone = router.generate(PROMPTS, params, "off")
        for chain in ((router.pool.names[0], router.pool.names[-1]), router.pool.names):
            routed = router.generate(PROMPTS, params, Speculation(chain, depth=4))
            assert [o.token_ids for o in routed] == [o.token_ids for o in alone]
        router.instruments.check_integrity()
    assert 2 in seen
