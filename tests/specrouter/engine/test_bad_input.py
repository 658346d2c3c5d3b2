"""Bad requests are refused with the field's name by a whole router, and nothing is queued.

Over HTTP they are refused in `tests/specrouter/http`; `InputValidation` by itself has a file too.
"""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from checks.exact.comparison import assert_whole
from specrouter import SLO, ChainRouter, RequestError, SamplingParams, Speculation
from specrouter.engine.context_limit import ContextLengthError
from tests.modelpool.factories import VOCAB_SIZE

Settings = dict[str, Any]
PROMPT = [1, 2, 3]
GREEDY = SamplingParams(max_new_tokens=4)


BAD_CHAINS = {
    "a member that is not in the pool": ["tiny", "target"],
    "another end than the target": ["small", "middle"],
    "no member": [],
    "a member twice": ["small", "small", "target"],
}


@pytest.fixture(scope="module")
def router(small_config: Settings) -> Iterator[ChainRouter]:
    """Its KV memory holds fewer tokens than `max_model_len` allows."""
    settings = copy.deepcopy(small_config)
    settings["engine"]["kv_budget_tokens"] = 200
    with ChainRouter.from_config(settings) as router:
        yield router


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("max_new_tokens", 0),
        ("max_new_tokens", -5),
        ("seed", -1),
        ("stop", ("",)),
        ("stop_token_ids", (-1,)),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 3.0),
        ("frequency_penalty", -3.0),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {"three": 1.0}),
        ("min_tokens", 1000),
        ("bad_words", ("",)),
        ("bad_words_ids", ((),)),
        ("n", 0),
        ("n", 129),
        ("logprobs", 21),
        ("logits_processors", (None,)),
    ],
)
def test_a_bad_sampling_parameter_is_refused_by_its_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field}\b"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "prompt"),
    [
        pytest.param("prompt", "", id="no text"),
        pytest.param("prompt", "x " * 300, id="too much text"),
        pytest.param("prompt", [1] * 300, id="too many ids"),
        pytest.param("input_ids", [], id="no ids"),
        pytest.param("input_ids", [VOCAB_SIZE], id="unknown id"),
        pytest.param("input_ids", [-1], id="negative id"),
        pytest.param("input_ids", [1.5], id="no whole number"),
    ],
)
def test_a_bad_prompt_is_refused(router: ChainRouter, field: str, prompt: Any) -> None:
    _assert_request_refused(router, field, prompt)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        pytest.param("stop_token_ids", (VOCAB_SIZE,), id="unknown stop id"),
        pytest.param("logit_bias", {VOCAB_SIZE: 1.0}, id="unknown biased id"),
        pytest.param("bad_words_ids", ((3, VOCAB_SIZE),), id="unknown banned id"),
        pytest.param("bad_words_ids", ((0,),), id="banned end of text"),
        pytest.param("bad_words", ("<|endoftext|>",), id="banned text that ends the text"),
        pytest.param("bad_words", ("  ",), id="banned text without tokens"),
        pytest.param("n", 2, id="several samples for one handle"),
    ],
)
def test_a_parameter_that_the_pool_cannot_serve_is_refused(
    router: ChainRouter, field: str, value: Any
) -> None:
    _assert_request_refused(router, field, params=SamplingParams(**{field: value}))


def test_a_prompt_without_room_for_one_token_is_refused(router: ChainRouter) -> None:
    _assert_request_refused(router, "prompt", [1] * 256)


def test_a_request_that_can_never_fit_in_kv_memory_is_refused(router: ChainRouter) -> None:
    params = SamplingParams(max_new_tokens=100)
    _assert_request_refused(router, "max_new_tokens", [1] * 150, params)
    _assert_request_refused(router, "prompt", [1] * 200)  # with however few new tokens


def test_who_asks_for_too_many_tokens_is_told_how_many_there_are(
    router: ChainRouter, small_config: Settings
) -> None:
    known = r"^max_new_tokens: This model's maximum context length is %d tokens%s\. However, "
    asked = r"you requested %d tokens \(%d in the prompt, 100 in the completion\): at most %d new"
    budget = r" \(engine\.kv_budget_tokens: .*\)"
    params = SamplingParams(max_new_tokens=100)
    with pytest.raises(ContextLengthError, match=known % (200, budget) + asked % (250, 150, 50)):
        router.submit([1] * 150, params)
    with pytest.raises(
        ContextLengthError, match=r"is 200 tokens.* the prompt has 300: at most 199"
    ):
        router.submit([1] * 300, params)
    with ChainRouter.from_config(small_config) as unbounded:
        with pytest.raises(ContextLengthError, match=known % (256, "") + asked % (270, 170, 86)):
            unbounded.submit([1] * 170, params)
        assert len(unbounded.generate([[1] * 170], SamplingParams(86))[0].token_ids) > 0


@pytest.mark.parametrize("chain", BAD_CHAINS.values(), ids=BAD_CHAINS.keys())
def test_a_chain_must_lead_to_the_target(router: ChainRouter, chain: list[str]) -> None:
    _assert_request_refused(
        router, "speculation.chain", speculation=lambda: Speculation(chain=tuple(chain))
    )


@pytest.mark.parametrize("depth", [0, -1])
def test_a_depth_below_one_is_refused(router: ChainRouter, depth: int) -> None:
    _assert_request_refused(
        router,
        "speculation.depth",
        speculation=lambda: Speculation(chain=("small", "target"), depth=depth),
    )


@pytest.mark.parametrize(("width", "depth"), [(0, None), (9, None), (8, 9), (5, 16)])
def test_a_tree_that_is_too_wide_is_refused(
    router: ChainRouter, width: int, depth: int | None
) -> None:
    _assert_request_refused(
        router,
        "speculation.width",
        speculation=lambda: Speculation(chain=("small", "target"), depth=depth, width=width),
    )


@pytest.mark.parametrize("quantity", ["tpot_ms", "ttft_ms", "tpot_ratio"])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, True, "50"])
def test_a_bad_objective_is_refused_by_its_name(
    router: ChainRouter, quantity: str, value: Any
) -> None:
    with pytest.raises(RequestError) as caught:
        router.submit(PROMPT, GREEDY, slo=SLO(**{quantity: value}))
    assert caught.value.field == f"slo.{quantity}"


@pytest.mark.parametrize("slo", ["urgent", 50, {"tpot_ms": 50}])
def test_an_unknown_class_of_objectives_is_refused(router: ChainRouter, slo: Any) -> None:
    with pytest.raises(RequestError) as caught:
        router.submit(PROMPT, GREEDY, slo=slo)
    assert caught.value.field == "slo"
    _assert_serves(router)


def test_one_bad_prompt_of_many_leaves_nothing_queued(router: ChainRouter) -> None:
    with pytest.raises(RequestError) as caught:
        router.generate([PROMPT, []], GREEDY)
    assert caught.value.field == "input_ids[1]"
    _assert_serves(router)


def test_of_several_prompts_the_refused_one_is_named(router: ChainRouter) -> None:
    with pytest.raises(RequestError, match=r"never fit in.*\(prompt 2\)") as caught:
        router.generate([PROMPT, PROMPT, [1] * 150], SamplingParams(100))
    assert caught.value.field == "max_new_tokens"
    _assert_serves(router)


def _assert_request_refused(
    router: ChainRouter,
    field: str,
    prompt: str | list[int] = PROMPT,
    params: SamplingParams = GREEDY,
    speculation: Callable[[], Speculation | None] = lambda: None,
) -> None:
    with pytest.raises(ValueError, match=field) as caught:
        router.submit(prompt, params, speculation=speculation())
    assert getattr(caught.value, "field", field) == field
    _assert_serves(router)


def _assert_serves(router: ChainRouter) -> None:
    """What was refused left nothing behind."""
    assert_whole(router)
    assert len(router.generate([PROMPT], GREEDY)[0].token_ids) <= GREEDY.max_new_tokens
    assert_whole(router)
