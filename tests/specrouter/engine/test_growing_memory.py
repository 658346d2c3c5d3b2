"""KV memory grows with texts: who finds none gives way and comes again, with the same text."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from specrouter import SamplingParams
from specrouter.config import TREE_SLOTS
from specrouter.request.handle import RequestHandle
from specrouter.slo.admission import Admission, fcfs
from specrouter.view import EngineView
from statemgr import BLOCK_SLOTS, row_slots
from tests.specrouter.engine.engines import EngineBench, changed, long_pool

NEW = 100
LONGEST = 200  # tokens of a request, for whose memory all are admitted
ROWS = 4
SAMPLED = SamplingParams(max_new_tokens=NEW, ignore_eos=True, temperature=0.8, seed=3)
KINDS = {"greedy": replace(SAMPLED, temperature=0.0), "sampled": SAMPLED}


@pytest.fixture(autouse=True)
def _rows_expect_to_grow_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that many begin where few can end."""
    monkeypatch.setattr("statemgr.state_manager.GROWTH_TOKENS", 1)


def prompt_of(index: int, length: int = 0) -> list[int]:
    draws = np.random.default_rng(index)
    return [int(each) for each in draws.integers(0, 300, length or int(draws.integers(1, 60)))]


def scarce(settings: dict[str, Any], **engine: Any) -> EngineBench:
    return EngineBench(settings, max_requests=ROWS, kv_budget_tokens=LONGEST, **engine)


@contextmanager
def watched(bench: EngineBench) -> Iterator[list[int]]:
    """Ids of the requests that give way; never the first, and always the last in the order."""
    book, gave_way = bench.engine.book, list[int]()
    give_way = book.give_way

    def watching(cycle: int, row: int) -> None:
        order = book.by_order()
        assert row == order[-1] != order[0]
        gave_way.append(book.running[row].handle.request_id)
        give_way(cycle, row)

    with patch.object(book, "give_way", watching):
        yield gave_way


def run(bench: EngineBench, handles: list[RequestHandle], most_steps: int = 3000) -> None:
    for step in range(most_steps):
        if all(handle.is_done for handle in handles):
            break
        bench.engine.step()
        if step % 8 == 0:
            bench.engine.check_integrity()
    assert all(handle.is_done for handle in handles), "somebody waits for ever"
    bench.engine.check_integrity()
    assert not bench.faults()


def texts_of(handles: list[RequestHandle]) -> list[list[int]]:
    assert {handle.result(0).finish_reason for handle in handles} == {"length"}
    return [handle.result(0).token_ids for handle in handles]


@pytest.fixture(scope="module", params=["sampled", pytest.param("greedy", marks=pytest.mark.exact)])
def alone(request: pytest.FixtureRequest, small_config: dict[str, Any]) -> tuple[Any, Any]:
    """Sampling parameters, and texts of requests that had all the memory there is."""
    bench, params = EngineBench(small_config, max_requests=ROWS), KINDS[request.param]
    handles = [bench.submit(prompt_of(index), params) for index in range(ROWS + 2)]
    run(bench, handles)
    return params, texts_of(handles)


@pytest.mark.parametrize("admission", [pytest.param("fcfs", marks=pytest.mark.exact), "slo"])
def test_who_gives_way_has_the_text_that_there_would_have_been(
    small_config: dict[str, Any], alone: tuple[Any, Any], admission: str
) -> None:
    params, texts = alone
    bench = scarce(small_config, admission=admission)
    with watched(bench) as gave_way:
        handles = [bench.submit(prompt_of(index), params) for index in range(ROWS + 2)]
        run(bench, handles)
    assert texts_of(handles) == texts
    assert gave_way
    assert 1 not in gave_way, "the first has what it needs"
    chains = [handle.result(0).metrics.chains for handle in handles]
    assert all(("small", "target") in each for each in chains), "trees shrink, and do not end"


def test_another_policy_s_order_is_followed(
    small_config: dict[str, Any], alone: tuple[Any, Any]
) -> None:
    """The newest first, whose memory is kept, too."""
    params, texts = alone
    bench = scarce(small_config)
    usual = fcfs(bench.config.engine.prefill_chunk)

    def newest(view: EngineView) -> Admission:
        every = view.running.joined(view.waiting)
        waiting = replace(view.waiting, priority_key=-view.waiting.arrived_s)
        ranks = dict(zip(every.id.tolist(), (-every.arrived_s).tolist(), strict=True))
        return replace(usual(replace(view, waiting=waiting)), ranks=ranks)

    bench.engine.policies.admits = newest
    with watched(bench) as gave_way:
        handles = [bench.submit(prompt_of(index), params) for index in range(ROWS + 2)]
        run(bench, handles)
    assert texts_of(handles) == texts
    assert gave_way
    assert len(handles) not in gave_way


def test_whoever_needs_all_memory_goes_on_while_others_wait(small_config: dict[str, Any]) -> None:
    bench = scarce(small_config)
    params = replace(KINDS["greedy"], max_new_tokens=LONGEST - 50)
    with watched(bench) as gave_way:
        first = bench.submit(prompt_of(0, 50), params)
        others = [bench.submit(prompt_of(index), KINDS["greedy"]) for index in (1, 2, 3)]
        run(bench, [first])
        run(bench, others)
    assert first.result(0).metrics.output_tokens == LONGEST - 50
    assert gave_way
    assert 1 not in gave_way


def test_nobody_comes_in_before_those_that_gave_way(small_config: dict[str, Any]) -> None:
    bench = scarce(small_config)
    handles = [bench.submit(prompt_of(index, 10), KINDS["greedy"]) for index in range(3)]
    with watched(bench) as gave_way:
        for _ in range(NEW):
            bench.engine.step()
            if gave_way:
                break
        assert gave_way
        urgent = bench.submit(prompt_of(9), KINDS["greedy"])
        [urged] = [one for one in bench.engine.book.waiting if one.handle is urgent]
        urged._key = -1e9  # as of another priority
        bench.engine.book.waiting.remove(urged)
        bench.engine.book.waiting.push(urged)
        for _ in range(3000):
            bench.engine.step()
            if any(one.gave_way for one in bench.engine.book.waiting):
                assert urged.row is None
            if urged.row is not None:
                break
        run(bench, [*handles, urgent])


@pytest.mark.parametrize("fails", ["small", pytest.param("target", marks=pytest.mark.exact)])
def test_memory_is_whole_after_failures_and_cancellations(
    small_config: dict[str, Any], fails: str
) -> None:
    bench, draws = scarce(small_config), np.random.default_rng(5)
    handles = [bench.submit(prompt_of(index), SAMPLED) for index in range(8)]
    model = bench.pool.get(fails)
    forward = model.forward

    def failing(*arguments: Any) -> Any:
        if draws.random() < 0.05:
            raise RuntimeError("the device is gone")
        return forward(*arguments)

    with watched(bench) as gave_way, patch.object(model, "forward", failing):
        for step in range(2000):
            if all(handle.is_done for handle in handles):
                break
            bench.engine.step()
            bench.engine.check_integrity()
            if step % 40 == 20 and (gave_way or fails == "target"):
                handles[int(draws.integers(len(handles)))].cancel()
    assert all(handle.is_done for handle in handles)
    assert gave_way or fails == "target"
    state = bench.engine.state()
    assert state.kv_reserved_tokens == 0
    assert state.kv_cached_tokens <= state.kv_capacity_tokens


# Memory for four of the longest


@pytest.fixture(scope="module")
def long_settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pool = long_pool(tmp_path_factory.mktemp("long"), 8192)
    return {"pool": pool, "engine": {}, "scheduler": {"policy": "target-only"}}


def test_requests_that_end_early_run_together_whatever_they_ask_for(
    long_settings: dict[str, Any],
) -> None:
    most, prompts = 4096, [prompt_of(index, 20) for index in range(16)]
    slots = 4 * row_slots(20 + most, TREE_SLOTS)
    settings = changed(long_settings, kv_memory=f"{slots * 2 * 16 * 4}B", max_model_len=8000)
    bench = EngineBench(settings, max_requests=16)
    assert bench.engine.state().kv_capacity_tokens == slots
    # They end with the first even token that comes after a hundred others.
    params = SamplingParams(
        max_new_tokens=most,
        min_tokens=100,
        stop_token_ids=tuple(range(0, 300, 2)),
        temperature=1.0,
        seed=1,
    )
    with watched(bench) as gave_way:
        handles = [bench.submit(prompt, params) for prompt in prompts]
        bench.engine.step()
        bench.engine.step()
        assert (bench.engine.state().running, bench.engine.state().waiting) == (16, 0)
        run(bench, handles)
    outputs = [handle.result(0) for handle in handles]
    assert {output.finish_reason for output in outputs} <= {"stop", "eos"}
    assert min(len(output.token_ids) for output in outputs) > 90
    assert not gave_way


def test_what_could_never_fit_is_known(small_config: dict[str, Any]) -> None:
    bench = scarce(small_config)
    assert bench.engine.can_ever_fit(LONGEST)
    assert not bench.engine.can_ever_fit(LONGEST + 1)
    assert bench.engine.state().kv_capacity_tokens % BLOCK_SLOTS == 0
