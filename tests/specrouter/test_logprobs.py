"""Log-probabilities are the target's own, whatever drafts for it and however tokens are chosen."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specrouter import ChainRouter, SamplingParams, Speculation
from specrouter.request import SpeculationOverride

PROMPT = [5, 17, 300, 42, 9, 5, 17, 300, 42]
TOLERANCE = 1e-4
GREEDY = SamplingParams(max_new_tokens=16, ignore_eos=True, logprobs=3)
SAMPLED = SamplingParams(
    max_new_tokens=16,
    ignore_eos=True,
    logprobs=3,
    temperature=1.2,
    top_k=20,
    repetition_penalty=1.3,
    seed=4,
)
CHAINS = (
    ("small", "target"),
    ("ngram", "target"),
    ("small", "middle", "target"),
    ("ngram", "middle", "target"),
)
OVERRIDES: list[SpeculationOverride] = [
    "off",
    *(Speculation(chain, 4, width) for chain in CHAINS for width in (1, 3)),
]


@pytest.fixture(scope="module")
def router(small_config: dict[str, Any]) -> Iterator[ChainRouter]:
    settings = copy.deepcopy(small_config)
    for model in settings["pool"]["models"]:
        model["dtype"] = "float32"
    settings["pool"]["models"].append({"name": "ngram", "source": "ngram"})
    with ChainRouter.from_config(settings) as router:
        yield router


@pytest.fixture(scope="module")
def target(small_family: dict[str, Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(str(small_family["target"]), dtype=torch.float32)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("speculation", OVERRIDES, ids=str)
def test_logprobs_are_those_of_the_raw_logits(
    router: ChainRouter, target: Any, speculation: SpeculationOverride, params: SamplingParams
) -> None:
    output = router.generate([PROMPT], params, speculation)[0]
    made = output.token_ids
    assert output.logprobs is not None
    assert [entry.token_id for entry in output.logprobs] == made
    with torch.inference_mode():
        logits = target(torch.tensor([PROMPT + made])).logits[0, len(PROMPT) - 1 : -1]
    for entry, expected in zip(output.logprobs, logits.log_softmax(-1), strict=True):
        assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=TOLERANCE)
        best = expected.topk(3).values.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best, abs=TOLERANCE)
        for token, value in entry.top:
            assert value == pytest.approx(float(expected[token]), abs=TOLERANCE)


@pytest.mark.parametrize("speculation", OVERRIDES, ids=str)
def test_deltas_bring_the_logprobs_of_their_tokens(
    router: ChainRouter, speculation: SpeculationOverride
) -> None:
    deltas = list(router.stream(PROMPT, GREEDY, speculation))
    assert all(len(delta.logprobs or ()) == len(delta.token_ids) for delta in deltas)
    output = deltas[-1].output
    assert output is not None
    assert [entry for delta in deltas for entry in delta.logprobs or ()] == output.logprobs


def test_no_logprobs_come_unasked_and_none_but_the_tokens_own_with_zero(
    router: ChainRouter,
) -> None:
    none, own = router.generate(
        [PROMPT] * 2, [SamplingParams(4, ignore_eos=True, logprobs=count) for count in (None, 0)]
    )
    assert none.logprobs is None
    assert own.logprobs is not None
    assert [entry.top for entry in own.logprobs] == [()] * 4
