"""Who is given a row, and how much is read of prompts, first come first served."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from specrouter.slo.admission import fcfs
from specrouter.view import EngineView
from tests.specrouter.predictions import flat, snapshot
from tests.specrouter.views import Entry, engine_view, request_view

KNOWN = snapshot({"big": flat(10.0)})


def request(number: int, key: float = 0.0, left: int = 10, **others: Any) -> Entry:
    usual = {"kv_tokens": left + 20, "remaining": 20, "max_new_tokens": 20}
    return request_view(number, priority_key=key, unread=left, **{**usual, **others})


def view(
    waiting: list[Entry],
    running: list[Entry],
    free_rows: int = 8,
    free_tokens: int | None = None,
) -> EngineView:
    memory = {"free_rows": free_rows, "kv_free_tokens": free_tokens}
    return engine_view(running, waiting, cycle=1, performance=KNOWN, **memory)


needs = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 100)), max_size=8)


@given(needs, st.integers(0, 6), st.none() | st.integers(0, 300), st.integers(1, 200))
def test_nobody_is_admitted_beyond_rows_or_memory_and_nobody_overtakes(
    asked: list[tuple[int, int]], free_rows: int, free_tokens: int | None, chunk: int
) -> None:
    waiting = [request(n, key, left=left) for n, (key, left) in enumerate(asked)]
    found = fcfs(chunk)(view(waiting, [], free_rows, free_tokens))
    by_id = {one.id: one for one in waiting}
    assert len(found.admitted) <= free_rows
    reserved = sum(by_id[each].kv_tokens for each in found.admitted)
    assert free_tokens is None or reserved <= free_tokens
    order = [one.id for one in sorted(waiting, key=lambda one: (one.priority_key, one.id))]
    assert list(found.admitted) == order[: len(found.admitted)]
    if found.waits_for_memory:
        assert free_tokens is not None
        next_one = by_id[order[len(found.admitted)]]
        assert reserved + next_one.kv_tokens > free_tokens
    else:
        assert len(found.admitted) == min(free_rows, len(waiting))


@given(st.lists(st.integers(0, 100), max_size=8), st.integers(0, 200))
def test_a_chunk_is_shared_in_the_order_of_admission(left: list[int], chunk: int) -> None:
    running = [request(n, left=tokens, row=n) for n, tokens in enumerate(left)]
    chunks = fcfs(chunk)(view([], running)).chunks
    wanted = {one.id: one.unread + 1 for one in running if one.unread}
    assert sum(chunks.values()) == min(chunk, sum(wanted.values()))
    assert all(0 < chunks[each] <= wanted[each] for each in chunks)
    short = [each for each in wanted if chunks.get(each, 0) < wanted[each]]
    later = [each for each in wanted if short and each > short[0]]
    assert not set(later) & set(chunks)


def test_a_request_that_is_admitted_reads_in_the_same_cycle_after_those_that_run() -> None:
    running = request(1, left=5, row=0)
    found = fcfs(8)(view([request(2, left=9)], [running]))
    assert found.admitted == (2,)
    assert found.chunks == {1: 6, 2: 2}
