"""What was read before is not read again, tells no tenant of another, and changes no token."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from modelpool import ModelPool
from modelpool.errors import ConfigError
from specrouter import ChainRouter, RequestError, SamplingParams, Speculation, Structure
from specrouter.config import RouterConfig
from test_support.routers import assert_whole
from tests.specrouter.engine.engines import changed

NEW = 12
CHAIN = ("small", "middle", "target")
PLAIN = SamplingParams(max_new_tokens=NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def router(small_config: dict[str, Any]) -> Iterator[ChainRouter]:
    with ChainRouter.from_config(changed(small_config, max_requests=4)) as router:
        yield router
        assert_whole(router)


@pytest.fixture(autouse=True)
def _clean(router: ChainRouter) -> Iterator[None]:
    """Every test begins with an empty cache."""
    cache = router.instruments.engine._manager._sharing.cache

    def empty() -> None:
        for node in cache:
            cache.uncache(node.block)

    router.instruments.run_idle(empty)
    yield
    router.instruments.check_integrity()


def text(seed: int, length: int) -> list[int]:
    draws = np.random.default_rng(seed)
    return [int(each) for each in draws.integers(0, 300, length)]


def served(router: ChainRouter, prompt: list[int], params: SamplingParams = PLAIN) -> Any:
    [output] = router.generate(prompt, params)
    assert output.error is None
    return output


def cold(router: ChainRouter, prompt: list[int], params: SamplingParams = PLAIN) -> list[int]:
    [output] = router.generate(prompt, replace(params, prefix_cache=False), speculation="off")
    assert output.metrics.cached_tokens == 0
    return list(output.token_ids)


def test_a_conversation_is_read_once(router: ChainRouter) -> None:
    prompt, known = text(1, 40), 1
    for turn in range(4):
        output = served(router, prompt)
        # The last token of an answer is not read when the answer ends.
        assert output.metrics.cached_tokens == known - 1
        assert output.token_ids == cold(router, prompt)
        known = len(prompt) + len(output.token_ids)
        prompt = [*prompt, *output.token_ids, *text(10 + turn, 7)]


@pytest.mark.parametrize(
    "params",
    [
        replace(PLAIN, temperature=1.0, seed=3),
        replace(PLAIN, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=-0.5),
        replace(PLAIN, logprobs=2),
        replace(PLAIN, prompt_logprobs=1),
        replace(PLAIN, structure=Structure("regex", "[a-z]{3,9}"), ignore_eos=False),
        replace(PLAIN, temperature=0.7, seed=5, top_k=20, bad_words_ids=((7,),)),
    ],
    ids=["sampled", "penalties", "log-probabilities", "prompt's", "structure", "warped"],
)
@pytest.mark.parametrize("speculation", [None, "off", Speculation(CHAIN, 3, 2)])
def test_whatever_is_asked_for_is_the_same_on_a_hit(
    router: ChainRouter, params: SamplingParams, speculation: Any
) -> None:
    prompt = text(2, 90)
    served(router, prompt)
    [output] = router.generate(prompt, params, speculation=speculation)
    reads_all = params.prompt_logprobs is not None
    assert output.metrics.cached_tokens == (0 if reads_all else len(prompt) - 1)
    assert output.token_ids == cold(router, prompt, params)
    if reads_all:
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(prompt)


def test_two_tenants_share_nothing(router: ChainRouter) -> None:
    prompt = text(3, 80)
    found = [
        served(router, prompt, replace(PLAIN, cache_salt=salt)).metrics.cached_tokens
        for salt in ("a", "b", None, "a", "b")
    ]
    assert found == [0, 0, 0, 79, 79]


def test_who_wants_no_cache_reads_and_leaves_nothing(router: ChainRouter) -> None:
    prompt = text(4, 80)
    off = replace(PLAIN, prefix_cache=False)
    assert served(router, prompt, off).metrics.cached_tokens == 0
    assert served(router, prompt).metrics.cached_tokens == 0
    assert served(router, prompt, off).metrics.cached_tokens == 0


def test_drafters_do_not_read_again_either(router: ChainRouter) -> None:
    prompt, chain = text(5, 100), Speculation(CHAIN, 3)
    [first] = router.generate(prompt, PLAIN, speculation=chain)
    lags: list[int] = []
    manager = router.instruments.engine._manager
    allocate = manager.allocate

    def noting(*arguments: Any) -> int | None:
        row = allocate(*arguments)
        for name in CHAIN:
            state = manager.state(name)
            assert state is not None
            lags.append(int(state.lengths(np.array([row]))[0]))
        return row

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "allocate", noting)
        [second] = router.generate(prompt, PLAIN, speculation=chain)
    assert lags == [99, 99, 99]
    assert second.token_ids == first.token_ids


@pytest.mark.parametrize(
    "speculation", ["off", Speculation(CHAIN[:1] + CHAIN[2:], 4), Speculation(CHAIN, 3, 2)]
)
def test_the_first_repeat_hits_all_of_a_prompt_and_drafts_are_as_good(
    router: ChainRouter, speculation: Any
) -> None:
    """No block of a hit is lost to drafters, nor a repeat, nor what they have read."""
    prompt = text(11, 140)
    [first] = router.generate(prompt, PLAIN, speculation=speculation)
    [again] = router.generate(prompt, PLAIN, speculation=speculation)
    assert (first.metrics.cached_tokens, again.metrics.cached_tokens) == (0, 139)
    assert again.token_ids == first.token_ids
    assert again.metrics.accepted_tokens >= first.metrics.accepted_tokens
    assert again.metrics.cycles <= first.metrics.cycles


def test_samples_of_a_prompt_read_it_once(router: ChainRouter) -> None:
    prompt, params = text(6, 120), replace(PLAIN, n=4, temperature=1.0, seed=9)
    handles = router.submit_all(prompt, params)
    outputs = [handle.result(60) for handle in handles]
    assert [output.metrics.cached_tokens for output in outputs] == [0, 119, 119, 119]
    again = router.submit_all(prompt, replace(params, prefix_cache=False), speculation="off")
    assert [one.token_ids for one in outputs] == [one.result(60).token_ids for one in again]


def test_requests_that_begin_alike_wait_for_the_first(router: ChainRouter) -> None:
    common = text(7, 150)
    prompts = [[*common, *text(20 + each, 10)] for each in range(3)]
    handles = [router.submit(prompt, PLAIN) for prompt in prompts]
    outputs = [handle.result(60) for handle in handles]
    assert sum(output.metrics.cached_tokens >= 150 for output in outputs) == 2
    assert [one.token_ids for one in outputs] == [cold(router, prompt) for prompt in prompts]


def test_a_cancelled_request_leaves_what_it_has_read(router: ChainRouter) -> None:
    prompt = text(8, 200)
    for _ in router.stream(prompt, replace(PLAIN, max_new_tokens=40)):
        break  # which cancels it
    router.instruments.run_idle(lambda: None)
    assert served(router, prompt).metrics.cached_tokens == 199


def test_what_was_found_is_shown(router: ChainRouter) -> None:
    before = replace(router.instruments.engine_state().cache)
    prompt = text(9, 50)
    served(router, prompt)
    served(router, prompt)
    record = router.instruments.prefixes()[-1].to_json()
    assert (record["prompt_tokens"], record["cached_tokens"]) == (50, 49)
    assert record["hit_rate"] == pytest.approx(0.98)
    router.instruments.run_idle(lambda: None)  # the last row is kept, too
    now = router.instruments.engine_state()
    assert now.cache.lookups - before.lookups == 2
    assert now.cache.hits - before.hits == 1
    assert now.cache.cached_tokens - before.cached_tokens == 49
    assert now.kv_cached_tokens == 64


@pytest.mark.parametrize(
    ("engine", "field"),
    [
        ({"kv_memory": 0}, "engine.kv_memory"),
        ({"kv_memory": "much"}, "engine.kv_memory"),
        ({"kv_memory": "1GiB", "kv_budget_tokens": 500}, "engine.kv_budget_tokens"),
        ({"prefix_cache": "perhaps"}, "engine.prefix_cache"),
    ],
)
def test_bad_settings_are_refused_by_name(
    small_config: dict[str, Any], engine: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        RouterConfig.load({**small_config, "engine": engine})
    assert refused.value.field == field


def test_kv_memory_decides_how_much_fits(small_config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^engine.kv_memory: 32 tokens alone take"):
        ChainRouter.from_config(changed(small_config, kv_memory="1B"))
    two_blocks = _memory_of(small_config, blocks=2)
    settings = changed(small_config, max_requests=4, kv_memory=two_blocks)
    with ChainRouter.from_config(settings) as router:
        state = router.instruments.engine_state()
        assert state.kv_capacity_tokens == 256
        with pytest.raises(
            RequestError, match=r"maximum context length is 176 tokens .engine.kv_m"
        ):
            router.generate(text(1, 170), replace(PLAIN, max_new_tokens=7))
        outputs = router.generate([text(each, 40) for each in range(5)], PLAIN)
        assert [output.error for output in outputs] == [None] * 5
        assert [one.token_ids for one in outputs] == [
            cold(router, text(each, 40)) for each in range(5)
        ]
        assert router.instruments.engine_state().cache.evictions > 0
        router.instruments.check_integrity()


def test_a_cache_that_is_off_keeps_nothing(small_config: dict[str, Any]) -> None:
    with ChainRouter.from_config(changed(small_config, prefix_cache=False)) as router:
        for _ in range(2):
            assert served(router, text(1, 40)).metrics.cached_tokens == 0
        assert router.instruments.engine_state().kv_cached_tokens == 0


def _memory_of(small_config: dict[str, Any], blocks: int) -> str:
    pool = ModelPool.from_config(small_config["pool"])
    per_token = sum(pool.plan(name).footprint.kv_bytes_per_token for name in pool.names)
    return f"{blocks * 128 * per_token}B"
