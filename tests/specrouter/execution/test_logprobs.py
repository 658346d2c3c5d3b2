"""Log-probabilities are the target's own, whatever drafts for it and however tokens are chosen."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from specrouter import ChainRouter, SamplingParams, Speculation
from specrouter.execution.logprobs import _shares
from specrouter.request.output import TokenLogprobs
from specrouter.request.spec import SpeculationOverride

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
    *(Speculation(chain, 4, 1 + 2 * (place % 2)) for place, chain in enumerate(CHAINS)),
]


def opened(small_config: dict[str, Any], **engine: Any) -> ChainRouter:
    """Reads prompts in chunks of 8 tokens."""
    pool = small_config["pool"]
    models = [{**model, "dtype": "float32"} for model in pool["models"]]
    models.append({"name": "ngram", "source": "ngram"})
    engine = {**small_config["engine"], "prefill_chunk": 8, **engine}
    return ChainRouter.from_config({"pool": {**pool, "models": models}, "engine": engine})


@pytest.fixture(scope="module")
def router(small_config: dict[str, Any]) -> Iterator[ChainRouter]:
    with opened(small_config) as router:
        yield router


@pytest.fixture(scope="module")
def target(small_family: dict[str, Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(str(small_family["target"]), dtype=torch.float32)


def assert_of(entries: list[TokenLogprobs], logits: torch.Tensor) -> None:
    """`logits` [n, V] before each of the tokens."""
    for entry, expected in zip(entries, logits.log_softmax(-1), strict=True):
        assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=TOLERANCE)
        best = expected.topk(len(entry.top)).values.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best, abs=TOLERANCE)
        for token, value in entry.top:
            assert value == pytest.approx(float(expected[token]), abs=TOLERANCE)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("speculation", OVERRIDES, ids=str)
def test_logprobs_are_those_of_the_raw_logits(
    router: ChainRouter, target: Any, speculation: SpeculationOverride, params: SamplingParams
) -> None:
    output = router.generate([PROMPT], params, speculation)[0]
    made = output.token_ids
    assert output.logprobs is not None
    assert [entry.token_id for entry in output.logprobs] == made
    assert {len(entry.top) for entry in output.logprobs} == {3}
    with torch.inference_mode():
        logits = target(torch.tensor([PROMPT + made])).logits[0, len(PROMPT) - 1 : -1]
    assert_of(output.logprobs, logits)


@pytest.mark.parametrize("speculation", OVERRIDES[:3], ids=str)
def test_deltas_bring_the_logprobs_of_their_tokens(
    router: ChainRouter, speculation: SpeculationOverride
) -> None:
    deltas = list(router.stream(PROMPT, GREEDY, speculation))
    assert all(len(delta.logprobs or ()) == len(delta.token_ids) for delta in deltas)
    output = deltas[-1].output
    assert output is not None
    assert [entry for delta in deltas for entry in delta.logprobs or ()] == output.logprobs


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_logprobs_that_are_no_numbers_end_their_request_alone(
    router: ChainRouter, name: str
) -> None:
    kinds: list[dict[str, Any]] = [{name: 2}, {name: 3}]

    def broken(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> torch.Tensor:
        found = _shares(logits, tokens, count)
        return found * math.nan if count == 2 else found

    with mock.patch("specrouter.execution.logprobs._shares", broken):
        asked = [SamplingParams(max_new_tokens=4, **kind) for kind in kinds]
        handles = [router.submit(PROMPT, params) for params in asked]
        bad, good = (handle.result(60) for handle in handles)
    assert bad.finish_reason == "error"
    assert "log-probabilities are not numbers" in str(bad.error)
    assert good.error is None
    assert len(good.token_ids) == 4


LONG = [(7 * i) % 300 + 3 for i in range(50)]


@pytest.mark.parametrize("chain", [None, ("small", "middle", "target")], ids=str)
def test_a_prompts_logprobs_are_those_of_the_raw_logits(
    router: ChainRouter, target: Any, chain: tuple[str, ...] | None
) -> None:
    prompts = [LONG, LONG[:9], LONG[:8], LONG[3:5], [5]]
    asked = SamplingParams(max_new_tokens=6, prompt_logprobs=2, ignore_eos=True)
    overrides: SpeculationOverride = "off" if chain is None else Speculation(chain, 3, 2)
    for prompt, output in zip(prompts, router.generate(prompts, asked, overrides), strict=True):
        found = output.prompt_logprobs
        assert found is not None
        assert found[0] is None
        read = [entry for entry in found[1:] if entry is not None]
        assert [entry.token_id for entry in read] == prompt[1:]
        assert all(len(entry.top) == 2 for entry in read)
        with torch.inference_mode():
            assert_of(read, target(torch.tensor([prompt])).logits[0, :-1])


def test_a_prompts_logprobs_come_with_the_first_tokens_and_nobody_elses(
    router: ChainRouter,
) -> None:
    asked = SamplingParams(
        max_new_tokens=6, prompt_logprobs=0, ignore_eos=True, n=2, temperature=1.0, seed=3
    )
    deltas = list(router.stream(LONG[:20], asked))
    for sample in (0, 1):
        first, *others = [delta for delta in deltas if delta.index == sample]
        assert first.prompt_logprobs is not None
        assert len(first.prompt_logprobs) == 20
        assert all(delta.prompt_logprobs is None for delta in others)
    [plain] = router.generate([LONG[:20]], SamplingParams(max_new_tokens=4))
    assert plain.prompt_logprobs is None
