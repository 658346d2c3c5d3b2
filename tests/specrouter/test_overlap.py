"""A router whose drafter and target compute side by side serves what the target alone does."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from checks.exact.comparison import assert_whole
from specrouter import ChainRouter, SamplingParams, Speculation, Structure
from specrouter.execution import drafting_thread
from specrouter.execution.cycle_drafting import CycleDrafting
from specrouter.request.params import Chain
from tests.modelpool.two_devices import cpu_as_two_devices
from tests.specrouter.faults import PATIENCE_S, Faults

CHAINS: list[Chain] = [("small", "target"), ("middle", "target"), ("small", "middle", "target")]
NEW = 16
PARAMS = [
    SamplingParams(max_new_tokens=NEW, ignore_eos=True),
    SamplingParams(max_new_tokens=NEW, temperature=1.0, seed=3, logprobs=2),
    SamplingParams(max_new_tokens=NEW, temperature=0.8, seed=5, top_k=20, repetition_penalty=1.2),
    SamplingParams(
        max_new_tokens=NEW, temperature=1.0, seed=7, structure=Structure("regex", "[a-z ]{2,30}")
    ),
]


@pytest.fixture
def overlapped() -> Iterator[list[bool]]:
    """Of each cycle, whether it took two turns."""
    seen: list[bool] = []
    real = CycleDrafting.turns

    def noting(own: CycleDrafting, plan: Any) -> Any:
        turns = real(own, plan)
        seen.append(len(turns) > 1)
        return turns

    with mock.patch.object(CycleDrafting, "turns", noting):
        yield seen


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    monkeypatch.setattr(drafting_thread, "_LOOKS", 1000)
    return Faults(monkeypatch)


@pytest.fixture
def router(small_config: dict[str, Any]) -> Iterator[ChainRouter]:
    settings = copy.deepcopy(small_config)
    for model in settings["pool"]["models"]:
        model["threads"] = 1
    settings["engine"] |= {"max_requests": 5, "overlap_drafting": True}
    with cpu_as_two_devices(), ChainRouter.from_config(settings) as router:
        yield router
        assert_whole(router)


def test_requests_that_come_end_and_leave_have_the_targets_texts(
    router: ChainRouter, overlapped: list[bool]
) -> None:
    draws = np.random.default_rng(2)
    asked = [
        (draws.integers(1, 300, int(draws.integers(2, 50))).tolist(), PARAMS[index % len(PARAMS)])
        for index in range(24)
    ]
    handles = []
    for index, (prompt, params) in enumerate(asked):
        most = replace(params, max_new_tokens=int(draws.integers(1, NEW + 1)))
        speculation = Speculation(CHAINS[index // 8], depth=3, width=1 + index % 3)
        handles.append((most, router.submit(prompt, most, speculation)))
        if index % 6 == 5:
            next(iter(handles[-2][1]))
            handles[-2][1].cancel()
    outputs = [handle.result(PATIENCE_S) for _, handle in handles]
    assert sum(overlapped) >= 8
    for (prompt, _), (params, _), output in zip(asked, handles, outputs, strict=True):
        [alone] = router.generate(prompt, params, speculation="off")
        if output.finish_reason == "cancelled":
            assert output.token_ids == alone.token_ids[: len(output.token_ids)]
        else:
            assert output.token_ids == alone.token_ids
            assert output.finish_reason == alone.finish_reason
            assert tokens_of(output.logprobs) == tokens_of(alone.logprobs)


def tokens_of(logprobs: Any) -> Any:
    return None if logprobs is None else [one.token_id for one in logprobs]


@pytest.mark.parametrize("fault", ["failing", "hanging"])
def test_a_drafter_that_fails_beside_the_target_costs_no_request(
    router: ChainRouter, overlapped: list[bool], fault: str, faults: Faults
) -> None:
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [3, 4]]
    params, chain = replace(PARAMS[0], max_new_tokens=40), Speculation(CHAINS[0], depth=3)
    alone = [output.token_ids for output in router.generate(prompts, params, speculation="off")]
    router.generate(prompts, params, speculation=chain)
    with faults.holding(forwards=0) as hold:
        handles = [router.submit(prompt, params, chain) for prompt in prompts]
        hold.let_pass(2)  # which is what the first tokens of all take
        getattr(faults, fault).add("small")
    try:
        outputs = [handle.result(PATIENCE_S) for handle in handles]
    finally:
        faults.released.set()
    assert any(overlapped)
    assert [output.token_ids for output in outputs] == alone
    assert router.instruments.restarts == 0
    assert router.instruments.engine_state().quarantines["small"] >= 1


def test_a_target_that_fails_ends_what_ran_and_serves_what_comes(
    router: ChainRouter, overlapped: list[bool], faults: Faults
) -> None:
    prompts, chain = [[5, 6, 7], [8, 9], [3, 4]], Speculation(CHAINS[0], depth=3)
    expected = [one.token_ids for one in router.generate(prompts, PARAMS[0], speculation=chain)]
    with faults.holding(forwards=0) as hold:
        handles = [router.submit(one, PARAMS[0], chain) for one in prompts]
        hold.let_pass(2)  # which is what the first tokens of all take
        faults.failing.add("target")
    outputs = [handle.result(PATIENCE_S) for handle in handles]
    faults.failing.clear()
    assert {output.finish_reason for output in outputs} == {"error"}
    assert all("target failed" in (output.error or "") for output in outputs)
    for output, text in zip(outputs, expected, strict=True):
        assert output.token_ids == text[: len(output.token_ids)]
    again = router.generate(prompts, PARAMS[0], speculation=chain)
    assert [output.token_ids for output in again] == expected
    assert any(overlapped)
    assert router.instruments.restarts == 0
