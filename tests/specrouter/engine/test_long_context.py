"""KV by need, as it is served: a long request beside many short ones, with memory for one."""

import json
from typing import Any

import numpy as np
import pytest

from specrouter import ChainRouter, RequestError, SamplingParams
from tests.modelpool.factories import save_llama
from tests.specrouter.engine.engines import EngineBench, changed

POSITIONS, BLOCK = 8192, 128
LONG, SHORT, MANY, NEW = 8000, 128, 32, 6  # tokens of a request, its output included
# What a short request may need: its tokens and a tree, two blocks; the long one: 64.
BLOCKS = MANY * 2 + LONG // BLOCK + 2


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a random model of 8,192 positions."""
    path = save_llama(
        tmp_path_factory.mktemp("long") / "model",
        hidden=16,
        layers=1,
        heads=1,
        kv_heads=1,
        dtype="float32",
    )
    config = json.loads((path / "config.json").read_text())
    config["max_position_embeddings"] = POSITIONS
    (path / "config.json").write_text(json.dumps(config))
    model = {"name": "target", "source": f"path:{path}", "dtype": "float32", "device": "cpu"}
    engine = {"max_requests": MANY + 1, "max_model_len": POSITIONS, "prefill_chunk": 4096}
    pool = {"target": "target", "models": [model]}
    return {"pool": pool, "engine": engine, "scheduler": {"policy": "target-only"}}


def within(settings: dict[str, Any], blocks: int) -> dict[str, Any]:
    per_token = 2 * 16 * 4  # keys and values of 16 numbers
    return changed(settings, kv_memory=f"{blocks * BLOCK * per_token}B")


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
    assert state.kv_reserved_tokens == BLOCKS * BLOCK
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
