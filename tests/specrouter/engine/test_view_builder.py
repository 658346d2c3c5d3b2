"""Views tell policies what is, in plain values that stay as they are."""

from typing import Any

import numpy as np
import pytest

from specrouter import SLO, SamplingParams, Speculation
from specrouter.engine.view_builder import LOOKED_UP, ViewBuilder
from specrouter.request.objective import resolve
from specrouter.request.spec import RequestSpec
from specrouter.view import EngineView, Standing
from statemgr import TokenChain
from tests.specrouter.engine.engines import GREEDY, PROMPTS, EngineBench
from tests.specrouter.views import by_row, entries_of

EVERY = frozenset({"small", "middle", "target"})


@pytest.fixture
def bench(small_config: dict[str, Any]) -> EngineBench:
    return EngineBench(small_config, max_requests=2, kv_budget_tokens=250, prefill_chunk=4)


def view(bench: EngineBench, cycle: int = 1, standing: Standing | None = None) -> EngineView:
    book, views = bench.engine.book, bench.engine.steps.views
    waiting = book.waiting.first_of(8)
    return views.build(cycle, waiting, EVERY, standing or Standing())


def test_an_engine_without_requests_has_all_its_room(bench: EngineBench) -> None:
    seen = view(bench)
    assert (len(seen.running), len(seen.waiting)) == (0, 0)
    assert (seen.free_rows, seen.kv_free_tokens) == (2, 352)
    assert seen.available == EVERY
    assert seen.loaded == {"target"}, "drafters are loaded when they are used"


def test_requests_that_wait_have_read_nothing_and_have_no_row(bench: EngineBench) -> None:
    bench.submit(
        PROMPTS[0], SamplingParams(max_new_tokens=6, temperature=0.5), Speculation(depth=2)
    )
    [request] = entries_of(view(bench).waiting)
    assert (request.row, request.unread, request.unread_by) == (
        None,
        4,
        {"small": 4, "middle": 4},
    )
    assert (request.kv_tokens, request.remaining, request.max_new_tokens) == (96, 6, 6)
    assert request.sampled
    assert request.override == Speculation(depth=2)
    assert request.tpot_ms is None


def test_running_requests_show_how_far_they_are(bench: EngineBench) -> None:
    for prompt in PROMPTS[:3]:
        bench.submit(prompt, GREEDY, "off")
    bench.engine.step()  # reads 4 of 5 + 2 prompt tokens
    seen = view(bench, 2)
    first, second = entries_of(seen.running)
    assert [first.row, second.row] == [0, 1]
    assert (first.unread, second.unread) == (0, 1)
    assert (first.unread_by["small"], second.unread_by["small"]) == (4, 1)
    assert (seen.free_rows, len(seen.waiting)) == (0, 1)
    assert [first.kv_tokens, second.kv_tokens] == [128, 128], "with a tree"
    assert seen.kv_free_tokens == 352 - 2 * 128
    for _ in range(4):
        bench.engine.step()
    later = by_row(view(bench, 6))[0]
    assert later.remaining < GREEDY.max_new_tokens
    assert later.decoded == GREEDY.max_new_tokens - later.remaining - 1
    assert later.decode_ms > 0.0
    assert first.remaining == GREEDY.max_new_tokens, "a view does not change"


def test_objectives_are_in_the_view(bench: EngineBench) -> None:
    objective = resolve(SLO(tpot_ms=20.0, ttft_ms=300.0), {}, lambda: 1.0)
    bench.submit(PROMPTS[1], objective=objective)
    [seen] = entries_of(view(bench).waiting)
    assert (seen.tpot_ms, seen.ttft_ms, seen.e2e_ms) == (20.0, 300.0, None)


def test_a_snapshot_is_taken_every_third_cycle_and_after_an_evaluation(
    bench: EngineBench,
) -> None:
    engine = bench.engine
    views = ViewBuilder(("small", "middle", "target"), (), engine.book, engine.profiler)

    def performance(cycle: int, evaluated_at: int = -1) -> int:
        standing = Standing(evaluated_at=evaluated_at)
        return id(views.build(cycle, (), EVERY, standing).performance)

    kept = [views.build(1, (), EVERY, Standing())]  # so that no id is used again
    first = id(kept[0].performance)
    assert [performance(2), performance(3)] == [first, first]
    kept.append(views.build(4, (), EVERY, Standing()))
    assert id(kept[1].performance) != first
    assert performance(5, evaluated_at=3) == id(kept[1].performance)
    assert performance(6, evaluated_at=5) != id(kept[1].performance)


def test_outputs_that_ended_by_themselves_tell_how_long_they_usually_are(
    bench: EngineBench,
) -> None:
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    handles = [bench.submit(PROMPTS[1], params, "off") for _ in range(8)]
    late = bench.submit(PROMPTS[1], params, "off")
    late.cancel()
    assert np.isnan(view(bench).waiting.output_tokens).all()
    bench.finish([*handles, late])
    for most in (4, 100):
        bench.submit(PROMPTS[1], SamplingParams(max_new_tokens=most), "off")
    assert view(bench, 99).waiting.output_tokens.tolist() == [4.0, 6.0]


def test_what_is_cached_is_looked_up_for_new_ones_and_a_few_of_the_others(
    bench: EngineBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are as they were, until it is their turn."""
    prefixes = bench.engine.book.executor.prefixes
    looks: list[tuple[int, ...]] = []

    def cached(request: RequestSpec, text: TokenChain) -> dict[str, int]:
        looks.append(tuple(request.token_ids))
        return {"target": len(looks)}

    monkeypatch.setattr(type(prefixes), "are_kept", True)
    monkeypatch.setattr(prefixes, "cached", cached)
    texts = [[7, *([8] * (100 + number))] for number in range(2 * LOOKED_UP + 1)]
    for text in texts[:-1]:
        bench.submit(text)
    waiting = bench.engine.book.waiting
    views = bench.engine.steps.views
    for cycle in (1, 2, 3):
        if cycle == 3:
            bench.submit(texts[-1])
        seen = views.build(cycle, list(waiting), EVERY, Standing()).waiting
    by_turn = [*texts[:-1], *texts[:LOOKED_UP], texts[-1], *texts[LOOKED_UP:-1]]
    assert looks == [tuple(text) for text in by_turn]
    assert seen.unread[0] == len(texts[0]) - 1 - (2 * LOOKED_UP + 1)
