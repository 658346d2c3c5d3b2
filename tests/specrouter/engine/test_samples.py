"""Several samples of one prompt, and callers' own processors, through the router."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specrouter import ChainRouter, RequestOutput, SamplingParams, Speculation
from specrouter.request.spec import SpeculationOverride
from test_support.routers import assert_whole
from tests.specrouter.engine.engines import changed

PROMPT = [5, 17, 300, 42, 9, 5, 17, 300]
SAMPLED = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=1.0, seed=7)
CHAINS = (("small", "target"), ("small", "middle", "target"), ("ngram", "middle", "target"))
OVERRIDES: list[SpeculationOverride] = [
    None,
    *(Speculation(chain, 4, width) for chain in CHAINS for width in (1, 3)),
]


@pytest.fixture(scope="module")
def router(small_config: dict[str, Any]) -> Iterator[ChainRouter]:
    with ChainRouter.from_config(changed(small_config, "ngram")) as router:
        yield router
        assert_whole(router)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


# Samples


def test_samples_differ_and_the_first_is_that_of_one(router: ChainRouter) -> None:
    outputs = router.generate([PROMPT], replace(SAMPLED, n=5), "off")
    assert [output.index for output in outputs] == list(range(5))
    assert len({tuple(output.token_ids) for output in outputs}) == 5
    assert outputs[0].token_ids == router.generate([PROMPT], SAMPLED, "off")[0].token_ids


@pytest.mark.parametrize("speculation", OVERRIDES, ids=str)
def test_no_chain_changes_a_sample(router: ChainRouter, speculation: SpeculationOverride) -> None:
    params = replace(SAMPLED, n=5)
    alone = tokens(router.generate([PROMPT], params, "off"))
    assert tokens(router.generate([PROMPT], params, speculation)) == alone


# Processors of the caller's


def moody(input_ids: Tensor, scores: Tensor) -> Tensor:
    """Fails after three tokens."""
    if input_ids.shape[1] > len(PROMPT) + 3:
        raise LookupError("no more words")
    return scores


def silent(input_ids: Tensor, scores: Tensor) -> Tensor:
    """Leaves no token after three."""
    is_over = input_ids.shape[1] > len(PROMPT) + 3
    return scores.new_full(scores.shape, float("-inf")) if is_over else scores


def test_a_processor_that_raises_ends_its_own_request_only(router: ChainRouter) -> None:
    expected = router.generate([PROMPT], SAMPLED, "off")[0].token_ids
    for speculation in OVERRIDES:
        params = [SAMPLED, replace(SAMPLED, logits_processors=(moody,)), SAMPLED]
        one, failed, other = router.generate([PROMPT] * 3, params, speculation)
        assert (failed.finish_reason, one.error, other.error) == ("error", None, None)
        assert "LookupError: no more words" in (failed.error or "")
        assert failed.token_ids == expected[:4]  # all before the place that failed
        assert one.token_ids == other.token_ids == expected
        assert_whole(router)


@pytest.mark.parametrize("speculation", OVERRIDES, ids=str)
@pytest.mark.parametrize(
    ("processor", "reason"),
    [(moody, "LookupError: no more words"), (silent, "leave no token to choose")],
)
def test_a_greedy_text_ends_where_no_token_is_left(
    router: ChainRouter,
    speculation: SpeculationOverride,
    processor: Any,
    reason: str,
) -> None:
    greedy = replace(SAMPLED, temperature=0.0, seed=None)
    expected = router.generate([PROMPT], greedy, "off")[0].token_ids
    params = [greedy, replace(greedy, logits_processors=(processor,))]
    other, failed = router.generate([PROMPT] * 2, params, speculation)
    assert (other.token_ids, other.error) == (expected, None)
    assert (failed.token_ids, failed.finish_reason) == (expected[:4], "error")
    assert reason in (failed.error or "")
    assert_whole(router)


@pytest.mark.parametrize("speculation", OVERRIDES[-2:], ids=str)
def test_a_text_says_only_what_a_processor_allows(
    router: ChainRouter, speculation: SpeculationOverride
) -> None:
    """Ids below 40; after 31 or more, none at all."""

    def narrow(input_ids: Tensor, scores: Tensor) -> Tensor:
        is_over = input_ids.shape[1] > len(PROMPT) and int(input_ids[0, -1]) > 30
        ids = torch.arange(scores.shape[-1]) < (0 if is_over else 40)
        return scores.masked_fill(~ids, float("-inf"))

    sampled = replace(SAMPLED, logits_processors=(narrow,))
    params = [sampled, replace(sampled, temperature=0.0)]
    for output in router.generate([PROMPT] * 2, params, speculation):
        *others, last = output.token_ids
        assert all(token <= 30 for token in others)
        assert (output.finish_reason == "error") == (30 < last < 40)


def test_what_fails_behind_the_end_of_a_text_does_not_concern_it(router: ChainRouter) -> None:
    text = router.generate([PROMPT], SAMPLED, "off")[0].token_ids
    end = next(at for at in (3, 2, 1) if text[at] not in text[:at])
    params = replace(SAMPLED, logits_processors=(moody,), stop_token_ids=(text[end],))
    for speculation in OVERRIDES:
        [output] = router.generate([PROMPT], params, speculation)
        assert (output.finish_reason, output.token_ids) == ("stop", text[: end + 1])
        assert_whole(router)


@pytest.mark.parametrize("strict", [True, False], ids=["raises", "excludes all"])
@pytest.mark.parametrize("speculation", OVERRIDES, ids=str)
def test_what_a_processor_does_to_a_rejected_draft_matters_to_nobody(
    router: ChainRouter, speculation: SpeculationOverride, strict: bool
) -> None:
    """A grammar of even ids: off it, where only drafts go, the processor fails."""

    def grammar(input_ids: Tensor, scores: Tensor) -> Tensor:
        if (input_ids[0, len(PROMPT) :] % 2 == 1).any():
            if strict:
                raise LookupError("off the grammar")
            return scores.masked_fill(scores == scores, float("-inf"))
        scores = scores.clone()
        scores[:, 1::2] = float("-inf")
        return scores

    params = replace(SAMPLED, temperature=0.0, logits_processors=(grammar,), max_new_tokens=24)
    expected = router.generate([PROMPT], params, "off")[0]
    assert expected.finish_reason == "length"
    got = router.generate([PROMPT], params, speculation)[0]
    assert (got.token_ids, got.finish_reason, got.error) == (expected.token_ids, "length", None)
