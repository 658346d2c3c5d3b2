"""KV by need, as it is served: a long request beside many short ones, with memory for one."""

from typing import Any

import numpy as np
import pytest

from specrouter import ChainRouter, RequestError, RouterConfig, SamplingParams
from specrouter.config import TREE_SLOTS
from statemgr import row_slots
from tests.specrouter.engine.engines import EngineBench, changed, long_pool

POSITIONS, BLOCK = 8192, 128
LONG, SHORT, MANY, NEW = 8000, 128, 32, 6  # tokens of a request, its output included
# What a short request may need: its tokens and a tree, two blocks; the long one: 64.
BLOCKS = MANY * 2 + LONG // BLOCK + 2


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a random model of 8,192 positions."""
    pool = long_pool(tmp_path_factory.mktemp("long"), POSITIONS)
    engine = {"max_requests": MANY + 1, "max_model_len": POSITIONS, "prefill_chunk": 4096}
    return {"pool": pool, "engine": engine, "scheduler": {"policy": "target-only"}}


def within(settings: dict[str, Any], blocks: int) -> dict[str, Any]:
    per_token = 2 * 16 * 4  # keys and values of 16 numbers
    return changed(settings, kv_memory=f"{blocks * BLOCK * per_token}B")


def without_lengths(settings: dict[str, Any], **engine: Any) -> dict[str, Any]:
    """As someone has it who gives a model and nothing else."""
    return {"pool": settings["pool"], "engine": engine}


def test_without_a_length_the_model_s_own_is_served(settings: dict[str, Any]) -> None:
    config = RouterConfig.load(without_lengths(settings))
    engine = config.engine
    usual = engine.max_requests * row_slots(1024, TREE_SLOTS)
    with ChainRouter.from_config(config) as router:
        assert router.limits.max_tokens == POSITIONS
        assert router.pool.kv_tokens == usual, "no more memory than requests of 1,024 tokens take"
        output = router.generate(prompt_of(LONG, 3), SamplingParams(max_new_tokens=NEW))[0]
        assert (output.metrics.prompt_tokens, output.error) == (LONG - NEW, None)
        with pytest.raises(RequestError, match=f"length is {POSITIONS} tokens. However"):
            router.submit(prompt_of(POSITIONS + NEW, 1))


@pytest.mark.parametrize(
    ("requests", "memory_mib", "longest"),
    [
        (1, 1024, POSITIONS),  # a tenth holds one, and one of 1,024 tokens would take less
        (1, 5, 4096 - TREE_SLOTS),  # half a MiB: 4,096 tokens of 128 bytes
        (1, 0, 1120 - TREE_SLOTS),  # never less than before
        (8, 0, POSITIONS),
    ],
)
def test_a_length_that_is_not_given_has_a_tenth_of_the_device(
    settings: dict[str, Any], requests: int, memory_mib: int, longest: int
) -> None:
    config = RouterConfig.load(without_lengths(settings, max_requests=requests))
    limit = config.engine.kv_limit
    assert limit is not None
    kv_tokens = limit.tokens(2 * 16 * 4, memory_mib * 2**20, POSITIONS)
    assert config.engine.max_request_tokens(POSITIONS, kv_tokens) == longest


def test_memory_that_is_given_bounds_a_length_that_is_not(settings: dict[str, Any]) -> None:
    config = without_lengths(settings, kv_memory=f"{20 * BLOCK * 2 * 16 * 4}B")
    with ChainRouter.from_config(config) as router:
        assert router.limits.max_tokens == 20 * BLOCK - TREE_SLOTS


def prompt_of(length: int, seed: int) -> list[int]:
    return [int(each) for each in np.random.default_rng(seed).integers(0, 300, length - NEW)]


def test_many_short_requests_and_a_long_one_run_together(settings: dict[str, Any]) -> None:
    bench = EngineBench(within(settings, BLOCKS), max_requests=MANY + 1)
    pool, engine = bench.pool, bench.config.engine
    assert pool.longest_sequence == POSITIONS
    assert pool.kv_tokens == BLOCKS * BLOCK
    assert engine.kv_tokens(POSITIONS) > 16 * pool.kv_tokens, "whole rows would not fit"
    assert 2 * engine.row_slots(POSITIONS) > pool.kv_tokens, "not even two of them"
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    prompts = [prompt_of(LONG, 0), *(prompt_of(SHORT, seed) for seed in range(1, MANY + 1))]
    handles = [bench.submit(prompt, params) for prompt in prompts]
    bench.engine.step()
    state = bench.engine.state()
    assert (state.running, state.waiting) == (MANY + 1, 0)
    assert state.kv_reserved_tokens == 4096, "the first chunk"
    outputs = bench.finish(handles)
    assert {output.finish_reason for output in outputs} == {"length"}
    assert [len(output.token_ids) for output in outputs] == [NEW] * (MANY + 1)


def test_a_request_that_can_never_fit_is_refused_by_its_field(settings: dict[str, Any]) -> None:
    params = SamplingParams(max_new_tokens=NEW)
    with ChainRouter.from_config(within(settings, blocks=20)) as router:
        for length, field in ((2481, "max_new_tokens"), (LONG, "prompt")):
            with pytest.raises(
                RequestError, match=r"length is 2480 tokens .engine\.kv_mem"
            ) as told:
                router.submit(prompt_of(length, 1), params)
            assert told.value.field == field
        assert router.generate(prompt_of(2480, 1), params)[0].error is None
