"""Requests come, go, fail and are cancelled; the others never notice.

On a family of small random models in float64, where nothing may differ from the target alone.
"""

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from modelpool.errors import ConfigError
from modelpool.packed_model import PackedModel
from processors.noise import NoiseBank
from specrouter import (
    SLO,
    ChainRouter,
    OverloadedError,
    RequestError,
    RequestHandle,
    RequestOutput,
    SamplingParams,
    Speculation,
    UnavailableError,
)
from specrouter.engine.request import Request
from specrouter.engine.serving import streamed
from specrouter.profile.cycle_times import Workload
from specrouter.profile.prediction import target_only
from specrouter.request.objective import SloLike
from specrouter.request.running import RunningRequest
from test_support.routers import assert_whole
from tests.specrouter.engine.engines import changed
from tests.specrouter.faults import PATIENCE_S, Faults, wait_until

Settings = dict[str, Any]

PROMPT = [5, 17, 300, 42, 9]
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=200, ignore_eos=True)
CHAIN = Speculation(chain=("small", "middle", "target"), depth=3)


@pytest.fixture(scope="module")
def router(small_config: Settings) -> Iterator[ChainRouter]:
    with open_router(small_config) as router:
        yield router
        assert_whole(router)


def open_router(small_config: Settings, **engine: Any) -> ChainRouter:
    return ChainRouter.from_config(changed(small_config, **engine))


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


def prompts(count: int) -> list[list[int]]:
    return [[(7 * i + 3 * k) % 300 + 1 for k in range(3 + i % 9)] for i in range(count)]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def alone(router: ChainRouter, prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return router.generate([prompt], params, "off")[0].token_ids


async def collected(
    router: ChainRouter, several: Sequence[str | list[int]], max_waiting: int | None = None
) -> list[list[int]]:
    """Tokens of a stream, prompt by prompt."""
    made: list[list[int]] = [[] for _ in several]
    asked = [
        Request(prompt=prompt, params=GREEDY, speculation=None, slo=None) for prompt in several
    ]
    async with streamed(router, asked, max_waiting) as deltas:
        async for number, delta in deltas:
            made[number] += delta.token_ids
    return made


def begun(router: ChainRouter, **more: Any) -> RequestHandle:
    """A long request without speculation that has its first token."""
    handle = router.submit(PROMPT, LONG, "off", **more)
    next(iter(handle))
    return handle


def is_idle(router: ChainRouter) -> bool:
    state = router.instruments.engine_state()
    return state.running + state.waiting == 0


# Batching


def test_more_requests_than_rows_are_all_served_as_if_alone(router: ChainRouter) -> None:
    several = prompts(20)
    params = [SamplingParams(max_new_tokens=1 + i % 7, ignore_eos=True) for i in range(20)]
    outputs = router.generate(several, params, CHAIN)
    assert [len(output.token_ids) for output in outputs] == [p.max_new_tokens for p in params]
    assert_whole(router)
    expected = [alone(router, p, q) for p, q in zip(several[:9], params, strict=False)]
    assert tokens(outputs)[:9] == expected


def test_prompts_are_read_in_the_order_of_admission(small_config: Settings, faults: Faults) -> None:
    """Whatever rows they have: short prompts that come and go in lower rows starve nobody."""
    short, long = [5] * 60, [(7 * k) % 300 + 1 for k in range(200)]
    one = SamplingParams(max_new_tokens=1, prefix_cache=False)  # each reads its own prompt
    with open_router(small_config, max_requests=2, prefill_chunk=8) as router:
        with faults.holding(forwards=0) as hold:
            first, patient = (router.submit(prompt, one, "off") for prompt in (short, long))
            hold.let_pass(8)  # of the 33 that read both, in rows 0 and 1
            assert first.is_done
            late = router.submit(short, one, "off")  # in row 0
            hold.let_pass(25)
            assert patient.is_done
            assert not late.is_done
        assert late.result(PATIENCE_S).finish_reason == "length"


# Cancellation and streaming


def test_cancellation_ends_a_request_and_frees_its_row(
    small_config: Settings, faults: Faults
) -> None:
    with open_router(small_config, max_requests=1) as router:
        expected = alone(router, PROMPT)
        with faults.holding() as hold:
            handle = begun(router)
            waiting = router.submit(PROMPT, LONG, "off")
            waiting.cancel()
            hold.let_pass()
            assert waiting.result(PATIENCE_S).finish_reason == "cancelled"
            assert waiting.result().token_ids == []
            handle.cancel()
        cancelled = handle.result(PATIENCE_S)
        assert cancelled.finish_reason == "cancelled"
        assert cancelled.token_ids == expected[:3]  # what its cycles brought until then
        assert alone(router, PROMPT) == expected
        handle.cancel()  # nothing happens
        assert_whole(router)


def test_closing_an_async_stream_cancels_its_request(router: ChainRouter, faults: Faults) -> None:
    async def leave() -> None:
        with faults.holding() as hold:
            async with aclosing(router.astream(PROMPT, LONG, "off")) as stream:
                await anext(stream)
                hold.let_pass(0)
        # In the same loop, whose end would cancel it as well.
        await asyncio.to_thread(wait_until, lambda: is_idle(router))

    asyncio.run(leave())
    assert faults.forwards["target"] == 2, "the one that waited was the last"


# Where a text ends


def test_a_request_may_fill_the_models_length_and_no_more(router: ChainRouter) -> None:
    params = SamplingParams(max_new_tokens=256 - len(PROMPT), ignore_eos=True)
    deep = Speculation(chain=("small", "middle", "target"), depth=16)
    outputs = router.generate([PROMPT] * 2, params, [deep, "off"])
    assert outputs[0].token_ids == outputs[1].token_ids
    assert len(outputs[0].token_ids) == params.max_new_tokens
    with pytest.raises(RequestError, match="length is 256 tokens"):
        router.submit([*PROMPT, 1], params)


def test_a_sampled_request_without_memory_for_its_noise_is_nobody_elses_affair(
    small_config: Settings, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(bank: NoiseBank) -> None:
        raise MemoryError("full")

    sampled = SamplingParams(max_new_tokens=12, temperature=1.0, seed=3)
    with open_router(small_config) as router:
        expected = router.generate([PROMPT], LONG, "off")[0].token_ids
        with monkeypatch.context() as patch, faults.holding() as hold:
            running = begun(router)
            patch.setattr(NoiseBank, "_grow", no_memory)
            failing = router.submit(PROMPT, sampled, "off")
            hold.let_pass()
            output = failing.result(PATIENCE_S)
            assert (output.finish_reason, output.error) == ("error", "MemoryError: full")
        assert running.result(PATIENCE_S).token_ids == expected
        assert router.generate([PROMPT], sampled, "off")[0].finish_reason == "length"
        assert_whole(router)


def test_the_seed_returned_reproduces_the_text(router: ChainRouter) -> None:
    drawn = SamplingParams(max_new_tokens=12, temperature=1.0)
    one, other = router.generate([PROMPT] * 2, drawn, CHAIN)
    assert one.seed != other.seed
    again = SamplingParams(max_new_tokens=12, temperature=1.0, seed=one.seed)
    for speculation in (None, "off", CHAIN):
        assert router.generate([PROMPT], again, speculation)[0].token_ids == one.token_ids


def test_each_sample_can_be_asked_for_and_goes_on_from_wherever_it_was_left(
    router: ChainRouter,
) -> None:
    params = SamplingParams(
        max_new_tokens=10, temperature=0.9, seed=3, n=3, presence_penalty=0.5, logprobs=1
    )
    whole = router.generate([PROMPT], params, CHAIN)

    async def rest(sample: int, made: int) -> RequestOutput:
        asked = Request(
            prompt=PROMPT,
            params=params,
            speculation=CHAIN,
            slo=None,
            generated=tuple(whole[sample].token_ids[:made]),
            sample=sample,
            elapsed_s=1.0,
            arrivals=((0.5, made),) if made else (),
        )
        async with streamed(router, [asked]) as stream:
            deltas = [delta async for _, delta in stream]
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert tokens == whole[sample].token_ids[made:]
        output = deltas[-1].output
        assert output is not None
        return output

    for sample, made in ((0, 4), (1, 0), (2, 1), (2, len(whole[2].token_ids) - 1)):
        output = asyncio.run(rest(sample, made))
        assert (output.text, output.index) == (whole[sample].text, sample)
        assert [one.token_id for one in output.logprobs or ()] == whole[sample].token_ids[made:]
        ttft_ms = output.metrics.ttft_ms or 0.0
        assert ttft_ms == pytest.approx(500.0) if made else ttft_ms > 1000.0


# Failures


def test_a_failing_drafter_costs_nothing_rests_and_is_used_again(
    small_config: Settings, faults: Faults
) -> None:
    with open_router(small_config) as router:
        expected = alone(router, PROMPT, LONG)
        faults.failing = {"small"}
        pair = Speculation(chain=("small", "target"), depth=3)
        output = router.generate([PROMPT], LONG, pair)[0]
        assert output.token_ids == expected
        assert set(output.metrics.chains) == {("target",)}
        # It rested: far fewer attempts than cycles.
        assert 1 < faults.forwards["small"] < output.metrics.cycles / 4
        faults.failing = set()
        assert_whole(router)
        again = router.generate([PROMPT] * 4, LONG, pair)
        assert tokens(again) == [expected] * 4
        assert ("small", "target") in again[0].metrics.chains
        assert_whole(router)


def test_a_failing_target_ends_the_affected_requests_and_no_other(
    small_config: Settings, faults: Faults
) -> None:
    with open_router(small_config, max_requests=2) as router:
        expected = alone(router, PROMPT)
        with faults.holding(forwards=0) as hold:
            running = [router.submit(PROMPT, LONG, CHAIN) for _ in range(2)]
            hold.let_pass(2)  # which is what the first tokens of both take
            waiting = router.submit(PROMPT, GREEDY, CHAIN)
            faults.failing = {"target"}
            hold.let_pass()
            for handle in running:
                output = handle.result(PATIENCE_S)
                assert output.finish_reason == "error"
                assert "target is on fire" in (output.error or "")
                assert output.token_ids
                assert output.token_ids == alone_prefix(expected, output)
            faults.failing = set()
        assert waiting.result(PATIENCE_S).token_ids == expected
        assert router.is_healthy
        assert router.generate([PROMPT], GREEDY, CHAIN)[0].token_ids == expected
        assert_whole(router)


def alone_prefix(expected: list[int], output: RequestOutput) -> list[int]:
    """The output, where it begins as it should."""
    made = output.token_ids
    assert made[: len(expected)] == expected[: len(made)]
    return made


# Who is served, and until when


def test_the_lowest_priority_number_is_admitted_first(
    small_config: Settings, faults: Faults
) -> None:
    with open_router(small_config, max_requests=1) as router:
        with faults.holding():
            next(iter(router.submit(PROMPT, GREEDY, "off")))
            waiting = {
                name: router.submit(PROMPT, GREEDY, priority=priority)
                for name, priority in (("later", 1), ("usual", 0), ("sooner", -1))
            }
        ttft_ms = {
            name: handle.result(PATIENCE_S).metrics.ttft_ms or 0.0
            for name, handle in waiting.items()
        }
    assert ttft_ms["sooner"] < ttft_ms["usual"] < ttft_ms["later"]


def test_a_request_ends_with_what_it_has_when_its_time_is_up(
    small_config: Settings, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead_s = 0.0
    ticking = partial(RunningRequest, clock=lambda: time.perf_counter() + ahead_s)
    monkeypatch.setattr("specrouter.router.RunningRequest", ticking)
    with open_router(small_config, max_requests=1) as router:
        expected = alone(router, PROMPT)
        with faults.holding() as hold:
            running = begun(router, timeout_s=20_000)
            waiting = router.submit(PROMPT, GREEDY, timeout_s=10_000)
            ahead_s = 15_000.0
            hold.let_pass()
            assert waiting.result(PATIENCE_S).finish_reason == "timeout"
            assert waiting.result().token_ids == []
            assert not running.is_done
            ahead_s = 25_000.0
        output = running.result(PATIENCE_S)
        assert output.finish_reason == "timeout"
        assert output.token_ids == expected[:3]
        assert_whole(router)


def test_a_drafter_that_cannot_be_timed_is_timed_later(
    small_config: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def profile(model: PackedModel) -> Any:
        raise RuntimeError("the clock is broken")

    monkeypatch.setenv("SPECROUTER_CACHE", str(tmp_path))  # where no times were kept
    with open_router(small_config, preload=False) as router:
        pair = Speculation(chain=("small", "target"))
        with monkeypatch.context() as patch:
            patch.setattr("specrouter.execution.model_times.profile_model", profile)
            router.generate([PROMPT], GREEDY, pair)
            assert "small" not in router.instruments.performance().times
        router.generate([PROMPT], LONG, pair)
        assert router.instruments.statistics().forwards["small"] > 0
        assert "small" in router.instruments.performance().times
        assert_whole(router)


@pytest.mark.parametrize("engine", [{"max_requests": 1}, {"kv_budget_tokens": 70}], ids=str)
def test_no_more_wait_for_a_row_or_for_memory_than_may_wait(
    small_config: Settings, faults: Faults, engine: Settings
) -> None:
    sixty = SamplingParams(max_new_tokens=60, ignore_eos=True)
    with open_router(small_config, **engine) as router:
        with faults.holding() as hold:
            running = router.submit(PROMPT, sixty, "off")
            next(iter(running))
            waiting = [router.submit(PROMPT, GREEDY, "off") for _ in range(2)]
            hold.let_pass()  # the next cycle admits neither
            with pytest.raises(OverloadedError) as caught:
                asyncio.run(collected(router, [PROMPT], max_waiting=2))
        assert caught.value.waiting == 2
        assert 1.0 <= caught.value.retry_after_s <= 60.0
        for handle in (running, *waiting):
            assert handle.result(PATIENCE_S).finish_reason == "length"


def test_requests_that_free_rows_take_do_not_wait_and_are_streamed_side_by_side(
    small_config: Settings,
) -> None:
    async def burst(router: ChainRouter) -> list[list[list[int]]]:
        each = (collected(router, [prompt], max_waiting=1) for prompt in prompts(4))
        return await asyncio.gather(*each)

    with open_router(small_config, max_requests=4) as router:
        expected = [[alone(router, prompt)] for prompt in prompts(4)]
        assert asyncio.run(burst(router)) == expected


def test_a_stream_is_refused_before_it_begins(router: ChainRouter) -> None:
    with pytest.raises(RequestError, match=r"^input_ids\[1\]"):
        asyncio.run(collected(router, [PROMPT, []]))


def test_generate_that_is_interrupted_leaves_nothing_running(
    small_config: Settings, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(handle: RequestHandle) -> RequestOutput:
        next(iter(handle))
        hold.let_pass(0)
        raise KeyboardInterrupt

    with open_router(small_config, max_requests=1) as router:
        with monkeypatch.context() as patch, faults.holding() as hold:
            patch.setattr(RequestHandle, "result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                router.generate([PROMPT] * 3, LONG, "off")
        wait_until(lambda: is_idle(router))
        assert router.instruments.slo_accounts.report().total.tokens == 2, (
            "of the cycles that had begun"
        )


def closing(router: ChainRouter) -> threading.Thread:
    """A thread that closes the router, which has begun to."""
    thread = threading.Thread(target=router.close)
    thread.start()
    wait_until(lambda: not router.is_healthy)
    return thread


def test_closing_the_router_cancels_what_runs_and_what_waits(
    small_config: Settings, faults: Faults
) -> None:
    router = open_router(small_config, max_requests=1)
    with faults.holding():
        running = begun(router)
        waiting = router.submit(PROMPT, LONG, "off")
        closes = closing(router)
    closes.join(PATIENCE_S)
    assert running.result(0).finish_reason == "cancelled"
    assert running.result(0).token_ids
    assert waiting.result(0).finish_reason == "cancelled"
    assert not router.is_healthy
    router.instruments.engine.check_integrity()
    with pytest.raises(RuntimeError, match="closed"):
        router.submit(PROMPT, GREEDY)
    router.close()  # nothing happens


# Objectives


def test_a_call_that_is_never_run_is_told_so(small_config: Settings, faults: Faults) -> None:
    router = open_router(small_config)
    is_told = threading.Event()

    def ask() -> None:
        with pytest.raises(UnavailableError, match="closed"):
            router.instruments.run_idle(lambda: None)
        is_told.set()

    with faults.holding() as hold:  # so that the router closes before there is time for it
        router.submit(PROMPT, LONG, "off")
        hold.let_pass(0)  # a cycle is under way, so nothing else is run
        threading.Thread(target=ask, daemon=True).start()
        wait_until(lambda: bool(router._thread._calls))
        closes = closing(router)
    closes.join(PATIENCE_S)
    assert is_told.wait(PATIENCE_S)


@pytest.fixture
def judging(small_config: Settings) -> Iterator[ChainRouter]:
    classes = {"patient": {"tpot_ms": 1e6, "ttft_ms": 1e6}}
    settings = changed(small_config, max_requests=1)
    with ChainRouter.from_config(settings | {"slo_classes": classes}) as router:
        yield router
        assert_whole(router)


def test_each_request_is_judged_by_its_objective_and_gives_the_same_tokens(
    judging: ChainRouter,
) -> None:
    expected = alone(judging, PROMPT)
    objectives: list[SloLike] = ["patient", SLO(tpot_ms=1e-6), SLO(tpot_ms=1e6, ttft_ms=1e-6), None]
    outputs = judging.generate([PROMPT] * 4, GREEDY, CHAIN, objectives)
    assert tokens(outputs) == [expected] * 4
    assert [output.metrics.attained for output in outputs] == [True, False, False, None]
    report = judging.instruments.slo_accounts.report()
    counts = {name: (one.requests, one.attained) for name, one in report.classes.items()}
    assert counts == {"patient": (1, 1), "default": (2, 0), "none": (2, 0)}
    assert report.total.attainment == pytest.approx(1 / 3)
    assert report.total.tokens == 5 * len(expected)
    assert report.total.goodput_tokens_per_s == pytest.approx(len(expected) / report.duration_s)


# The interface


def test_a_ratio_is_times_the_time_of_one_request_alone(judging: ChainRouter) -> None:
    baseline_ms = target_only(
        judging.instruments.performance(), Workload(requests=1), "target"
    ).cycle_ms
    assert baseline_ms > 0
    output = judging.generate([PROMPT], GREEDY, slo=SLO(tpot_ratio=3))[0]
    assert output.metrics.objective is not None
    assert output.metrics.objective.tpot_ms == pytest.approx(3 * baseline_ms)


def test_a_policy_may_be_changed_between_requests(small_config: Settings) -> None:
    with open_router(small_config) as router:
        expected = alone(router, PROMPT)
        for policy, settings, chains in (
            ("target-only", {}, {("target",)}),
            ("static", {"chain": ["small", "middle", "target"]}, {CHAIN.chain, ("target",)}),
            ("smallest", {"depth": 2}, {("small", "target"), ("target",)}),
            (
                "static",
                {"chain": ["middle", "target"], "depth": 3, "width": 2},
                {("middle", "target"), ("target",)},
            ),
        ):
            router.set_policy(policy, **settings)
            output = router.generate([PROMPT], GREEDY)[0]
            assert output.token_ids == expected
            assert set(output.metrics.chains) == chains
        assert_whole(router)


@pytest.mark.parametrize(
    ("field", "policy", "settings"),
    [
        ("trees.budget", "adaptive", {"trees": {"budget": 5}}),
        ("engine.admission", "adaptive", {"admission": "clever"}),
        ("scheduler.depth", "adaptive", {"depth": 0}),
        ("scheduler.chain", "static", {"chain": ["small", "middle"]}),
        ("scheduler.chain", "static", {}),
    ],
)
def test_a_bad_policy_is_refused_and_names_its_field(
    field: str, policy: str, settings: Settings, router: ChainRouter
) -> None:
    with pytest.raises(ConfigError) as caught:
        router.set_policy(policy, **settings)
    assert caught.value.field == field


def test_a_text_that_has_ended_is_not_resumed(router: ChainRouter) -> None:
    prompt = prompts(1)[0]
    whole = alone(router, prompt)
    params = SamplingParams(max_new_tokens=40, stop_token_ids=(whole[2],))
    with pytest.raises(RequestError, match="generated"):
        router.submit(prompt, params, generated=whole[:4])


def test_a_row_that_is_nearly_full_does_not_cost_the_others_their_drafts(
    small_config: Settings,
) -> None:
    with open_router(small_config, max_model_len=128, max_requests=2) as router:
        chain = (router.pool.names[0], router.pool.target)
        outputs = router.generate(
            [prompts(1)[0] * 12, prompts(1)[0]],
            [SamplingParams(max_new_tokens=20), SamplingParams(max_new_tokens=60)],
            Speculation(chain, depth=8),
        )
        assert [output.finish_reason for output in outputs] == ["length", "length"]
        # The first token comes with the prompt, and a last one alone may need no draft.
        assert outputs[1].metrics.chains.get((router.pool.target,), 0) <= 2
        router.instruments.check_integrity()
