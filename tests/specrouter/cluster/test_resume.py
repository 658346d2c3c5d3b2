"""What a sample has received is what its next attempt begins with, on the same clock."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from transformers import PreTrainedTokenizerBase

from specrouter import SamplingParams, Speculation
from specrouter.cluster.resume import StreamProgress, draw
from specrouter.engine.request import Request
from specrouter.request.objective import Objective, Stage, resolve
from specrouter.request.output import Delta, FinishReason, TokenLogprobs
from specrouter.request.receipt import ServedModel, receipt_of
from specrouter.request.spec import RequestSpec
from test_support.factories import make_tokenizer
from tests.request_outputs import request_output

PROMPT = (7, 8, 9)
LONG_PROMPT = tuple(range(200))
EOS = frozenset({0})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def progress(
    objective: Objective | None = None,
    sample: int = 0,
    prompt: tuple[int, ...] = PROMPT,
    **params: object,
) -> StreamProgress:
    asked = SamplingParams(**{"max_new_tokens": 6, "n": 2, **params})  # type: ignore[arg-type]
    spec = RequestSpec(
        token_ids=prompt,
        generated=(),
        params=asked,
        speculation=None,
        seed=5,
        sample=sample,
        objective=objective,
        timeout_s=9.0,
        priority=2,
    )
    override = Speculation(prediction="def")
    return StreamProgress(
        Request(
            prompt="the prompt",
            params=asked,
            speculation=override,
            slo="fast",
            priority=2,
            timeout_s=9.0,
        ),
        spec,
    )


def logprobs(*tokens: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(token, -token / 10) for token in tokens]


def last(*tokens: int, reason: FinishReason = "length") -> Delta:
    whole = request_output([1, 2, *tokens], {"acceptance_length": 1.0})
    output = replace(whole, finish_reason=reason, logprobs=logprobs(*tokens))
    return Delta(
        text="b",
        token_ids=list(tokens),
        finish_reason=reason,
        output=output,
        index=0,
        logprobs=logprobs(*tokens),
    )


def test_the_first_attempt_has_the_seed_that_was_drawn_and_the_prompt_as_ids() -> None:
    args = progress(sample=1).args()
    assert args.params is not None
    assert (args.prompt, args.sample, args.params.seed) == (PROMPT, 1, 5)
    assert (args.generated, args.arrivals, args.priority, args.timeout_s) == ((), (), 2, 9.0)
    assert args.speculation == Speculation(prediction="def")
    assert args.slo is None, "what was asked is resolved, and here nothing was"


def test_what_was_received_counts_as_output_of_the_next_attempt() -> None:
    one = progress()
    one.take(Delta(text="a", token_ids=[1]))
    time.sleep(0.01)
    one.take(Delta(text="b", token_ids=[2, 3]))
    one.take(Delta(text="c", token_ids=[]))
    args = one.args()
    assert args.generated == (1, 2, 3)
    assert [count for _, count in args.arrivals] == [1, 2]
    (first_s, _), (second_s, _) = args.arrivals
    assert 0 <= first_s < second_s <= args.elapsed_s
    routed = one.routed(4)
    assert (routed.prompt_tokens, routed.remaining, routed.has_begun) == (6, 3, True)


def test_log_probabilities_of_all_attempts_are_in_the_output() -> None:
    one = progress(logprobs=1, prompt_logprobs=0)
    assert one.args().params == SamplingParams(
        max_new_tokens=6, n=2, logprobs=1, prompt_logprobs=0, seed=5
    )
    whole = [None, *logprobs(8, 9)]
    one.take(Delta(text="a", token_ids=[1, 2], logprobs=logprobs(1, 2), prompt_logprobs=whole))
    params = one.args().params
    assert params is not None
    assert params.prompt_logprobs is None, "they have come"
    output = one.take(last(3)).output
    assert output is not None
    assert output.logprobs == logprobs(1, 2, 3)
    assert output.prompt_logprobs == whole


def test_a_receipt_has_the_logits_of_all_attempts() -> None:
    one = progress(receipt=True)
    assert one.args().params == SamplingParams(max_new_tokens=6, n=2, receipt=True, seed=5)
    served = ServedModel(specrouter="1", source="m", settings={}, files={}, arithmetic=())
    spec = RequestSpec(
        token_ids=PROMPT, generated=(), params=SamplingParams(), speculation=None, seed=5
    )
    each = [replace(found, logit=found.token_id / 2) for found in logprobs(1, 2, 3)]
    one.take(Delta(text="a", token_ids=[1, 2], logprobs=each[:2]))
    end = last(3)
    assert end.output is not None
    receipt = receipt_of(served, spec, [1, 2, 3], [1.5], "length")
    news = replace(end, logprobs=each[2:], output=replace(end.output, receipt=receipt))
    output = one.take(news).output
    assert output is not None
    assert output.receipt == receipt_of(served, spec, [1, 2, 3], [0.5, 1.0, 1.5], "length")


def test_an_objective_goes_on_in_milliseconds_with_its_class() -> None:
    objective = Objective(
        ttft_ms=100.0, slo_class="fast", stages=(Stage(9.0),), on_unattainable="reject"
    )
    one = progress(objective)
    assert resolve(one.args().slo, {}, lambda: 1.0) == objective, "whatever classes are there"
    assert one.rejects
    one.take(Delta(text="a", token_ids=[1]))
    assert not one.rejects, "its caller has seen a token"


def test_an_end_without_a_replica_has_what_came(tokenizer: PreTrainedTokenizerBase) -> None:
    one = progress(Objective(tpot_ms=1000.0, ttft_ms=1000.0), logprobs=0)
    one.take(Delta(text="a", token_ids=[11, 12], logprobs=logprobs(11, 12)))
    delta = one.ended("error", "no replica is left", tokenizer, EOS)
    output = delta.output
    assert output is not None
    assert (output.finish_reason, output.error) == ("error", "no replica is left")
    assert output.token_ids == [11, 12]
    assert output.text == tokenizer.decode([11, 12])
    assert output.logprobs == logprobs(11, 12)
    assert output.metrics.attained is False
    assert output.metrics.ttft_ms is not None
    assert delta.token_ids == [], "they have been told"


def test_a_time_limit_counts_from_the_first_submission() -> None:
    one = progress()
    left_s = one.left_s()
    assert left_s is not None
    assert 8.0 < left_s <= 9.0
    one.submitted_s -= 10.0
    assert one.left_s() == 0.0


def test_draws_are_of_seed_sample_and_attempt() -> None:
    drawn = [draw(5, 0, 0), draw(5, 0, 1), draw(5, 1, 0)]
    assert len(set(drawn)) == 3
    assert drawn[0] == draw(5, 0, 0)
    assert all(0.0 <= each < 1.0 for pair in drawn for each in pair)


def test_a_prompt_that_is_not_kept_is_expected_in_no_prefix_cache() -> None:
    assert len(progress(prompt=LONG_PROMPT).keys) == 1
    assert progress(prompt=LONG_PROMPT, prefix_cache=False).keys == ()
