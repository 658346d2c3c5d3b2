"""A request ends once, where its parameters say, and tells its caller everything."""

from collections.abc import Sequence
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from specrouter.output import Delta, FinishReason, RequestOutput
from specrouter.params import SamplingParams
from specrouter.request import Prompt, RequestHandle, RunningRequest
from tests.modelpool.factories import make_tokenizer

PROMPT = (7, 8, 9)
EOS = 0
PAIR, ALONE = ("small", "big"), ("big",)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class Running:
    """A running request, and what it delivered."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, generated: Sequence[int] = (), **params: Any
    ) -> None:
        self.deltas: list[Delta] = []
        self.handle = RequestHandle(1, lambda: None, self.deltas.append)
        prompt = Prompt(PROMPT, tuple(generated), SamplingParams(**params), None, seed=5)
        self.request = RunningRequest(prompt, self.handle, tokenizer, frozenset({EOS}))

    def accept(self, tokens: Sequence[int], chain: tuple[str, ...]) -> None:
        """What the engine does with a cycle's tokens."""
        self.handle.deliver(self.request.accept(tokens, chain))

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        self.handle.deliver(self.request.finish(reason, error))

    @property
    def output(self) -> RequestOutput:
        return self.handle.result(timeout=0)


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids


def test_tokens_come_as_deltas_and_the_last_has_the_output(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    running = Running(tokenizer, max_new_tokens=4)
    running.accept([11, 12], PAIR)
    running.accept([13, 14], ALONE)
    assert [delta.token_ids for delta in running.deltas] == [[11, 12], [13, 14]]
    assert [delta.finish_reason for delta in running.deltas] == [None, "length"]
    assert "".join(delta.text for delta in running.deltas) == running.output.text
    assert running.output.text == tokenizer.decode([11, 12, 13, 14])
    assert running.output.token_ids == [11, 12, 13, 14]
    assert running.output.seed == 5


def test_tokens_after_the_end_are_dropped(tokenizer: PreTrainedTokenizerBase) -> None:
    running = Running(tokenizer, max_new_tokens=2)
    running.accept([11, 12, 13], PAIR)
    assert running.output.token_ids == [11, 12]
    assert running.output.finish_reason == "length"


def test_the_end_of_text_ends_the_output_and_is_part_of_it(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    running = Running(tokenizer)
    running.accept([11, EOS, 12], PAIR)
    assert running.output.token_ids == [11, EOS]
    assert running.output.finish_reason == "eos"
    assert running.output.text == tokenizer.decode([11])


def test_the_end_of_text_may_be_ignored(tokenizer: PreTrainedTokenizerBase) -> None:
    running = Running(tokenizer, max_new_tokens=3, ignore_eos=True)
    running.accept([11, EOS, 12], PAIR)
    assert running.output.token_ids == [11, EOS, 12]
    assert running.output.finish_reason == "length"


def test_a_stop_id_ends_the_output_and_is_part_of_it(tokenizer: PreTrainedTokenizerBase) -> None:
    running = Running(tokenizer, stop_token_ids=(12,))
    running.accept([11, 12, 13], PAIR)
    assert running.output.token_ids == [11, 12]
    assert running.output.finish_reason == "stop"
    assert running.output.text == tokenizer.decode([11, 12])


def test_a_stop_id_that_is_the_end_of_text_counts_even_where_that_is_ignored(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    running = Running(tokenizer, stop_token_ids=(EOS,), ignore_eos=True)
    running.accept([11, EOS, 12], PAIR)
    assert running.output.finish_reason == "stop"


def test_a_stop_text_is_not_part_of_the_text_and_its_tokens_are(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    ids = ids_of(tokenizer, "one END two")
    running = Running(tokenizer, stop=("END",))
    for token in ids:
        if not running.request.finished:
            running.accept([token], ALONE)
    assert running.output.text == "one "
    assert running.output.finish_reason == "stop"
    kept = running.output.token_ids
    assert kept == ids[: len(kept)]
    assert "END" in tokenizer.decode(kept)
    assert "".join(delta.text for delta in running.deltas) == "one "


def test_text_that_was_held_back_comes_with_the_last_delta(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    ids = ids_of(tokenizer, "xEN")
    running = Running(tokenizer, stop=("END",), max_new_tokens=len(ids))
    for token in ids:
        running.accept([token], ALONE)
    assert running.output.text == "xEN"
    assert running.deltas[-1].text == "EN"


def test_generated_tokens_count_as_output_and_are_not_delivered_again(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    running = Running(tokenizer, generated=[11, 12], max_new_tokens=3)
    assert running.request.prompt.committed == (*PROMPT, 11, 12)
    assert running.request.prompt.reserve_tokens == len(PROMPT) + 3
    running.accept([13], ALONE)
    assert running.deltas[0].token_ids == [13]
    assert running.output.token_ids == [11, 12, 13]
    assert running.output.text == tokenizer.decode([11, 12, 13])


def test_the_metrics_count_cycles_chains_and_committed_tokens(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    running = Running(tokenizer, max_new_tokens=6)
    running.accept([11, 12, 13], PAIR)
    running.accept([14], ALONE)
    running.accept([15, 16], PAIR)
    metrics = running.output.metrics
    assert (metrics.cycles, metrics.chains) == (3, {PAIR: 2, ALONE: 1})
    assert metrics.acceptance_length == 2.0
    assert (metrics.prompt_tokens, metrics.output_tokens) == (3, 6)
    assert metrics.ttft_ms is not None
    assert metrics.tpot_ms is not None
    assert metrics.to_json()["chains"] == {"small>big": 2, "big": 1}


def test_a_request_that_ends_before_its_first_token_has_no_times(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    running = Running(tokenizer)
    running.finish("error", "no memory")
    assert (running.output.finish_reason, running.output.error) == ("error", "no memory")
    assert (running.output.text, running.output.token_ids) == ("", [])
    metrics = running.output.metrics
    assert (metrics.ttft_ms, metrics.tpot_ms, metrics.cycles) == (None, None, 0)


def test_a_request_ends_once(tokenizer: PreTrainedTokenizerBase) -> None:
    running = Running(tokenizer, max_new_tokens=1)
    running.accept([11], ALONE)
    with pytest.raises(AssertionError):
        running.finish("cancelled")
    assert len(running.deltas) == 1


def test_waiting_for_a_result_may_time_out(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(TimeoutError, match="request 1"):
        Running(tokenizer).handle.result(timeout=0.01)


def test_cancelling_wakes_the_engine_and_may_be_repeated() -> None:
    woken: list[bool] = []
    handle = RequestHandle(1, lambda: woken.append(True))
    assert not handle.is_cancelled
    handle.cancel()
    handle.cancel()
    assert handle.is_cancelled
    assert len(woken) == 2


def test_a_handle_iterates_to_the_last_delta(tokenizer: PreTrainedTokenizerBase) -> None:
    handle = RequestHandle(1, lambda: None)
    prompt = Prompt(PROMPT, (), SamplingParams(max_new_tokens=2), None, seed=0)
    request = RunningRequest(prompt, handle, tokenizer, frozenset())
    handle.deliver(request.accept([11], ALONE))
    handle.deliver(request.accept([12], ALONE))
    assert [delta.token_ids for delta in handle] == [[11], [12]]
