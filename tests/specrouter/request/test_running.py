"""A request ends once, where its parameters say, and tells its caller everything."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from specrouter import ChainRouter
from specrouter.request.detokenizer import Detokenizer
from specrouter.request.handle import RequestHandle
from specrouter.request.objective import SLO, Objective, Stage
from specrouter.request.output import Delta, FinishReason, RequestOutput, TokenLogprobs
from specrouter.request.params import RequestError, SamplingParams
from specrouter.request.running import RunningRequest
from specrouter.request.spec import RequestSpec
from test_support.factories import make_tokenizer
from tests.specrouter.fake_router import FakeEngine, router_without_models
from tests.specrouter.faults import wait_until
from tests.specrouter.request.test_detokenizer import ids_of

PROMPT = (7, 8, 9)
EOS = 0
PAIR, ALONE = ("small", "big"), ("big",)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class Running:
    """A running request, and what it delivered."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        generated: Sequence[int] = (),
        prompt: Sequence[int] = PROMPT,
        spec: Mapping[str, Any] = MappingProxyType({}),
        **params: Any,
    ) -> None:
        """`spec`: further fields of it."""
        self.deltas: list[Delta] = []
        self.handle = RequestHandle(1, lambda: None, self.deltas.append)
        asked = RequestSpec(
            token_ids=tuple(prompt),
            generated=tuple(generated),
            params=SamplingParams(**params),
            speculation=None,
            seed=5,
            **spec,
        )
        text = Detokenizer(tokenizer, asked.params, asked.token_ids)
        self.request = RunningRequest(
            asked, self.handle, text, frozenset({EOS}), lambda: time.perf_counter()
        )

    def accept(self, tokens: Sequence[int], chain: tuple[str, ...], drafted: int = 0) -> None:
        """What the engine does with a cycle's tokens."""
        logprobs = logprobs_of(tokens)
        self.handle.deliver(self.request.accept(tokens, chain, logprobs, drafted=drafted))

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        self.handle.deliver(self.request.finish(reason, error))

    @property
    def output(self) -> RequestOutput:
        return self.handle.result(timeout=0)


Start = Callable[..., Running]


@pytest.fixture
def start(tokenizer: PreTrainedTokenizerBase) -> Start:
    return partial(Running, tokenizer)


def logprobs_of(tokens: Sequence[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token, -token / 100, ((1, -0.5),)) for token in tokens]


def test_the_text_of_every_token_is_told_where_drafts_are_asked_for(start: Start) -> None:
    """What was held back, for it might have become a stop text, is the last token's."""
    texts = start(max_new_tokens=3, return_drafts=True)
    texts.accept([11, 12], PAIR)
    texts.accept([13, 14], ALONE)  # the text ends with the first
    whole = texts.output.text
    held = start(max_new_tokens=3, return_drafts=True, stop=(whole + "x",))
    held.accept([11, 12], PAIR)
    held.accept([13, 14], ALONE)
    for running in (texts, held):
        drafts = running.output.drafts
        assert drafts == [delta.draft for delta in running.deltas]
        assert [(one.cycle, len(one.texts)) for one in drafts or ()] == [(1, 2), (2, 1)]
        assert "".join(text for one in drafts or () for text in one.texts) == whole
    assert [one.texts for one in held.output.drafts or ()] == [("", ""), (whole,)]


def test_tokens_come_as_deltas_and_the_last_has_the_output(
    start: Start, tokenizer: PreTrainedTokenizerBase
) -> None:
    running = start(max_new_tokens=4)
    running.accept([11, 12], PAIR)
    running.accept([13, 14], ALONE)
    assert [delta.token_ids for delta in running.deltas] == [[11, 12], [13, 14]]
    assert [delta.finish_reason for delta in running.deltas] == [None, "length"]
    assert "".join(delta.text for delta in running.deltas) == running.output.text
    assert running.output.text == tokenizer.decode([11, 12, 13, 14])
    assert running.output.token_ids == [11, 12, 13, 14]
    assert running.output.seed == 5
    assert not running.handle.deliver(running.request.finish("cancelled")), "it ends once"
    assert len(running.deltas) == 2
    assert running.output.finish_reason == "length"


@pytest.mark.parametrize(
    ("params", "kept", "reason", "said"),
    [
        ({"max_new_tokens": 2}, [11, 12], "length", [11, 12]),
        ({}, [11, 12, EOS], "eos", [11, 12]),
        ({"max_new_tokens": 4, "ignore_eos": True}, [11, 12, EOS, 13], "length", [11, 12, 13]),
        ({"stop_token_ids": (12,)}, [11, 12], "stop", [11]),
        (
            {"stop_token_ids": (12,), "include_stop_str_in_output": True},
            [11, 12],
            "stop",
            [11, 12],
        ),
        ({"stop_token_ids": (EOS,), "ignore_eos": True}, [11, 12, EOS], "stop", [11, 12]),
    ],
)
def test_the_token_that_ends_the_output_is_part_of_it_and_what_follows_is_dropped(
    start: Start,
    tokenizer: PreTrainedTokenizerBase,
    params: dict[str, Any],
    kept: list[int],
    reason: FinishReason,
    said: list[int],
) -> None:
    running = start(logprobs=0, **params)
    running.accept([11, 12, EOS, 13, 14], PAIR)
    assert (running.output.token_ids, running.output.finish_reason) == (kept, reason)
    assert running.output.text == tokenizer.decode(said)
    assert running.output.logprobs == running.deltas[-1].logprobs == logprobs_of(kept)


def test_generated_tokens_count_as_output_and_are_not_delivered_again(
    start: Start, tokenizer: PreTrainedTokenizerBase
) -> None:
    running = start(generated=[11, 12], max_new_tokens=3, logprobs=0)
    assert running.request.spec.committed == (*PROMPT, 11, 12)
    assert running.request.spec.total_tokens == len(PROMPT) + 3
    running.accept([13], ALONE)
    assert running.deltas[0].token_ids == [13]
    assert running.output.token_ids == [11, 12, 13]
    assert running.output.text == tokenizer.decode([11, 12, 13])
    assert running.output.logprobs == logprobs_of([13]), "of this attempt"


def test_the_metrics_count_cycles_chains_and_committed_and_drafted_tokens(start: Start) -> None:
    running = start(max_new_tokens=6)
    running.accept([11, 12, 13], PAIR, drafted=8)  # two of eight, and the target's own
    running.accept([14], ALONE)
    running.accept([15, 16, 17, 18], PAIR, drafted=3)  # the text ends with the second
    metrics = running.output.metrics
    assert (metrics.cycles, metrics.chains) == (3, {PAIR: 2, ALONE: 1})
    assert metrics.acceptance_length == pytest.approx(8 / 3)
    assert (metrics.prompt_tokens, metrics.output_tokens) == (3, 6)
    assert (metrics.drafted_tokens, metrics.accepted_tokens) == (11, 4)
    shown = metrics.to_json()
    assert shown["chains"] == {"small>big": 2, "big": 1}
    assert (shown["drafted_tokens"], shown["accepted_tokens"]) == (11, 4)


def test_acceptance_is_told_in_vllms_names_and_by_chain(start: Start) -> None:
    other = ("middle", "big")
    running = start(max_new_tokens=20)
    for tokens, chain, drafted in ((3, PAIR, 8), (1, ALONE, 0), (1, PAIR, 4), (3, other, 2)):
        running.accept(range(11, 11 + tokens), chain, drafted=drafted)
    running.finish("cancelled")
    seen = running.output.metrics.to_json()["speculative_decoding"]
    by_chain = seen.pop("chains")
    assert seen == {
        "mean_acceptance_length": pytest.approx(1 + 4 / 3),
        "draft_acceptance_rate": pytest.approx(4 / 14),
        "acceptance_histogram": [1, 0, 2, 0, 0, 0, 0, 0, 0],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 14,
        "num_spec_tokens": 8,
    }
    assert list(by_chain) == ["small>big", "middle>big"]
    assert by_chain["middle>big"]["acceptance_histogram"] == [0, 0, 1]
    for name in ("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens"):
        assert seen[name] == sum(each[name] for each in by_chain.values())


def test_of_two_threads_that_end_a_request_one_is_heard(start: Start) -> None:
    heard: list[Delta] = []

    def listen(delta: Delta) -> None:
        time.sleep(0.05)
        heard.append(delta)

    handle = RequestHandle(1, lambda: None, listen)
    request = start().request
    last = [request.finish("error", cause) for cause in ("stuck", "late")]
    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(handle.deliver, last))
    assert sorted(told) == [False, True]
    assert [delta.output for delta in heard] == [handle.result(0)]


def test_waiting_for_a_result_may_time_out(start: Start) -> None:
    with pytest.raises(TimeoutError, match="request 1"):
        start().handle.result(timeout=0.01)


def test_cancelling_wakes_the_engine_and_may_be_repeated() -> None:
    woken: list[bool] = []
    handle = RequestHandle(1, lambda: woken.append(True))
    assert not handle.is_cancelled
    handle.cancel()
    handle.cancel()
    assert handle.is_cancelled
    assert len(woken) == 2


# Objectives


def test_a_handle_iterates_to_the_last_delta(start: Start) -> None:
    handle, request = RequestHandle(1, lambda: None), start(max_new_tokens=2).request
    handle.deliver(request.accept([11], ALONE))
    handle.deliver(request.accept([12], ALONE))
    assert [delta.token_ids for delta in handle] == [[11], [12]]


class Clock:
    """Stands still but for what is added to `now_s`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr("specrouter.request.running.time.perf_counter", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def serve_slowly(running: Running, clock: Clock, times_s: Sequence[tuple[float, int]]) -> None:
    """Commits of so many tokens, each so many seconds after the one before."""
    for after_s, count in times_s:
        clock.now_s += after_s
        running.accept([11] * count, ALONE)


@pytest.mark.parametrize(
    ("objective", "attained"),
    [
        (None, None),
        (Objective(tpot_ms=50.0, ttft_ms=2000.0, e2e_ms=2250.0), True),
        (Objective(tpot_ms=49.9, ttft_ms=None), False),
        (Objective(tpot_ms=None, ttft_ms=1999.0), False),
        (Objective(tpot_ms=None, ttft_ms=None, e2e_ms=2249.0), False),
    ],
)
def test_an_objective_is_judged_by_the_decoding_and_by_the_first_token(
    start: Start, clock: Clock, objective: Objective | None, attained: bool | None
) -> None:
    running = start(spec={"objective": objective}, max_new_tokens=6)
    serve_slowly(running, clock, [(2.0, 1), (0.125, 2), (0.125, 3)])  # 250 ms for 5 tokens
    metrics = running.output.metrics
    assert (metrics.ttft_ms, metrics.tpot_ms, metrics.e2e_ms) == (2000.0, 50.0, 2250.0)
    assert (metrics.objective, metrics.attained) == (objective, attained)
    assert running.request.objective == objective


def test_times_of_every_10_tokens_end_with_the_text(start: Start, clock: Clock) -> None:
    running = start(max_new_tokens=21)
    # The last commit brings five tokens, of which the text takes two: they share its time.
    serve_slowly(running, clock, [(2.0, 1), *[(0.125, 4)] * 2, (0.5, 10), (0.25, 5)])
    metrics = running.output.metrics
    assert len(running.output.token_ids) == 21
    assert metrics.tpot_ms_every_10 == pytest.approx((35.0, 65.0))
    assert metrics.tpot_ms == pytest.approx(50.0)
    assert metrics.to_json()["tpot_ms_every_10"] == list(metrics.tpot_ms_every_10)


# Log-probabilities


def test_logprobs_end_at_a_stop_text(start: Start, tokenizer: PreTrainedTokenizerBase) -> None:
    running = start(stop=("END",), logprobs=0)
    running.accept(ids_of(tokenizer, "one END two"), PAIR)
    assert running.output.finish_reason == "stop"
    assert running.output.logprobs == logprobs_of(running.output.token_ids)
    assert running.deltas[-1].logprobs == running.output.logprobs


# Samples


FIRST = FakeEngine.first_token
THREE = SamplingParams(max_new_tokens=4, n=3)
ENDLESS = SamplingParams(max_new_tokens=50_000, n=3)
Served = tuple[ChainRouter, FakeEngine]


@pytest.fixture
def served(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    router, engine = router_without_models(tokenizer, monkeypatch)
    with router:
        yield router, engine


def assert_samples(outputs: Sequence[RequestOutput]) -> None:
    assert [output.index for output in outputs] == [0, 1, 2]
    assert [output.token_ids for output in outputs] == [[FIRST + index] * 4 for index in range(3)]


def test_a_sample_says_which_it_is_and_logprobs_that_nobody_asked_for_are_dropped(
    start: Start,
) -> None:
    running = start(spec={"sample": 2}, max_new_tokens=2)
    running.accept([11], PAIR)
    running.accept([12], PAIR)
    assert [(delta.index, delta.logprobs) for delta in running.deltas] == [(2, None)] * 2
    assert (running.output.index, running.output.logprobs) == (2, None)


def test_submit_serves_one_sample_and_a_refused_prompt_leaves_none_queued(served: Served) -> None:
    router, engine = served
    with pytest.raises(RequestError, match="submit_all") as caught:
        router.submit([1, 2], THREE)
    assert caught.value.field == "n"
    with pytest.raises(RequestError):
        router.generate([[1, 2], []], THREE)
    assert engine.seen == []


@pytest.mark.parametrize("is_async", [False, True])
def test_a_stream_has_the_deltas_of_all_samples(served: Served, is_async: bool) -> None:
    router = served[0]

    async def collect() -> list[Delta]:
        return [delta async for delta in router.astream([1, 2], THREE)]

    deltas = asyncio.run(collect()) if is_async else list(router.stream([1, 2], THREE))
    assert sum(delta.finish_reason is not None for delta in deltas) == 3
    for index in range(3):
        own = [delta for delta in deltas if delta.index == index]
        assert [token for delta in own for token in delta.token_ids] == [FIRST + index] * 4
    outputs = [delta.output for delta in deltas if delta.output is not None]
    assert_samples(sorted(outputs, key=lambda output: output.index))


@pytest.mark.parametrize("is_async", [False, True])
def test_leaving_a_stream_cancels_all_samples(served: Served, is_async: bool) -> None:
    router, engine = served

    async def leave() -> None:
        async with aclosing(router.astream([1, 2], ENDLESS)) as deltas:
            await anext(deltas)

    if is_async:
        asyncio.run(leave())
    else:
        next(iter(router.stream([1, 2], ENDLESS)))
    wait_until(lambda: not engine.running)
    assert [one.handle.result(60.0).finish_reason for one in engine.seen] == ["cancelled"] * 3


def objectives(engine: FakeEngine) -> list[Objective | None]:
    return [request.objective for request in engine.seen]


def test_every_way_in_takes_an_objective(served: Served) -> None:
    router, engine = served
    one, asked = SamplingParams(max_new_tokens=1), SLO(tpot_ms=50, ttft_ms=900)

    async def stream() -> list[Delta]:
        return [delta async for delta in router.astream([1], one, slo=asked)]

    router.generate([1], one, slo=asked)
    list(router.stream([1], one, slo=asked))
    asyncio.run(stream())
    router.submit([1], one, slo=asked).result(60.0)
    for handle in router.submit_all([1], THREE, slo=asked):
        handle.result(60.0)
    assert objectives(engine) == [Objective(tpot_ms=50.0, ttft_ms=900.0)] * 7


@pytest.mark.parametrize(
    "slo", ["urgent", 50, [SLO(tpot_ms=5)], [SLO(tpot_ms=5), "urgent"], [SLO(tpot_ms=5), 50]]
)
def test_one_bad_objective_leaves_nothing_queued(served: Served, slo: Any) -> None:
    router, engine = served
    with pytest.raises(RequestError) as caught:
        router.generate([[1], [2]], THREE, slo=slo)
    assert caught.value.field == "slo"
    assert engine.seen == []


def test_one_cancelled_sample_leaves_the_others(served: Served) -> None:
    handles = served[0].submit_all([1, 2], SamplingParams(max_new_tokens=200, n=3))
    handles[1].cancel()
    reasons = [handle.result(60.0).finish_reason for handle in handles]
    assert reasons == ["length", "cancelled", "length"]


def gone(delta: Delta) -> None:
    raise RuntimeError("Event loop is closed")


@pytest.mark.parametrize(("has_left", "level"), [(True, "DEBUG"), (False, "WARNING")])
def test_a_normal_early_leave_is_no_warning(
    has_left: bool, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    handle = RequestHandle(1, lambda: None, gone)
    if has_left:
        handle.cancel()
    assert handle.deliver(Delta(text="a", token_ids=[5]))
    [record] = caplog.records
    assert record.levelname == level
    assert record.getMessage() == "request 1: it has no listener any more: Event loop is closed"
    assert handle.is_cancelled


# A first token after 0.5 s, 3 more after 2 s, and 1 s later another attempt.
AGAIN: dict[str, Any] = {"elapsed_s": 3.0, "arrivals": ((0.5, 1), (2.0, 3))}


def test_attempts_share_a_clock(start: Start) -> None:
    objective = Objective(tpot_ms=400.0, ttft_ms=600.0)
    running = start([11, 12, 13, 14], spec={**AGAIN, "objective": objective}, max_new_tokens=8)
    request = running.request
    assert request.has_begun
    assert not request.rejects
    assert request.pace.decoded == 3
    running.accept([15], ALONE)
    running.accept([16, 17, 18], ALONE)
    metrics = running.output.metrics
    assert metrics.ttft_ms == pytest.approx(500.0)
    assert metrics.tpot_ms == pytest.approx((3.0 - 0.5) * 1000 / 7, rel=0.1)
    assert metrics.attained
    assert metrics.e2e_ms == pytest.approx(3000.0, rel=0.1)
    assert running.output.token_ids == list(range(11, 19))


def test_stages_of_earlier_attempts_are_judged_by_their_times(start: Start) -> None:
    objective = Objective(
        tpot_ms=None, ttft_ms=None, stages=(Stage(100.0, until_tokens=3), Stage(5000.0))
    )
    running = start([11, 12, 13, 14], spec={**AGAIN, "objective": objective}, max_new_tokens=5)
    assert [stage.tpot_ms for stage in running.request.pace.stages] == [5000.0]
    running.accept([15], ALONE)
    assert running.output.metrics.attained_stages == (False, True)


def test_the_time_of_a_request_is_up_over_all_attempts(start: Start) -> None:
    for elapsed_s, is_late in ((2.5, True), (1.0, False)):
        running = start(spec={"elapsed_s": elapsed_s, "timeout_s": 2.0})
        assert running.request.is_late == is_late
