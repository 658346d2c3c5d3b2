"""What is refused reaches the caller of a router with the field's name, and nothing is queued.

What is refused, and why: `test_input_validation`, and tests of the room `request`.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from specrouter import SLO, ChainRouter, RequestError, SamplingParams
from specrouter.engine.context_limit import ContextLengthError
from test_support.routers import assert_whole
from tests.specrouter.engine.engines import changed

Settings = dict[str, Any]
PROMPT = [1, 2, 3]
GREEDY = SamplingParams(max_new_tokens=4)


@pytest.fixture(scope="module")
def router(small_config: Settings) -> Iterator[ChainRouter]:
    """Its KV memory holds fewer tokens than `max_model_len` allows."""
    with ChainRouter.from_config(changed(small_config, kv_budget_tokens=200)) as router:
        yield router


@pytest.mark.parametrize(
    ("field", "prompts", "arguments"),
    [
        ("prompt[1]", [PROMPT, [1] * 200], {}),
        ("input_ids[1]", [PROMPT, []], {}),
        ("max_new_tokens", [PROMPT, [1] * 150], {"params": SamplingParams(max_new_tokens=100)}),
        ("slo", [PROMPT, PROMPT], {"slo": [SLO(tpot_ms=50)]}),
    ],
)
def test_of_several_prompts_none_is_queued(
    router: ChainRouter, field: str, prompts: Any, arguments: Settings
) -> None:
    with pytest.raises(RequestError) as caught:
        router.generate(prompts, **arguments)
    assert caught.value.field == field
    assert_whole(router)
    assert len(router.generate([PROMPT], GREEDY)[0].token_ids) <= GREEDY.max_new_tokens
    assert_whole(router)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [("n", {"params": SamplingParams(n=2)}), ("timeout_s", {"timeout_s": 0})],
)
def test_what_one_handle_cannot_stand_for_is_refused(
    router: ChainRouter, field: str, arguments: Settings
) -> None:
    with pytest.raises(RequestError) as caught:
        router.submit(PROMPT, **{"params": GREEDY, **arguments})
    assert caught.value.field == field


def test_who_asks_for_too_many_tokens_is_told_how_many_there_are(router: ChainRouter) -> None:
    known = r"^max_new_tokens: .* length is 200 tokens \(engine\.kv_budget_tokens: .*\)"
    asked = r"\. .* 250 tokens \(150 in the prompt, 100 in the completion\): at most 50 new"
    with pytest.raises(ContextLengthError, match=known + asked):
        router.submit([1] * 150, SamplingParams(max_new_tokens=100))
