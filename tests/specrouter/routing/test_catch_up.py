"""Who is caught up, in what order, and where it cannot be earned back."""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from specrouter.cycle import CATCH_UP_TOKENS, DraftShape, Option, share_shortest_first
from specrouter.profile.cycle_times import Workload
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.routing.catch_up import CycleCatchUp, Drafting
from specrouter.view import EngineView, RequestView
from tests.specrouter.predictions import PAIR, TRIPLE, flat, rising, snapshot

Ints = NDArray[np.int64]
CHUNK = 100
KNOWN = snapshot({"small": flat(2.0), "middle": flat(10.0), "big": rising(50.0)})
GAIN_MS = 20.0  # of each token that is drafted for


class Reader:
    """`lags` by row, of all models; `read` are models that lack nothing."""

    def __init__(
        self, *lags: int, read: tuple[str, ...] = (), performance: PerformanceSnapshot = KNOWN
    ) -> None:
        self.lags = np.array(lags, dtype=np.int64)
        self.read = read
        self.performance = performance

    def slots_of(self, rows: Ints) -> Ints:
        return np.full_like(rows, 128)

    def missed(self, model: str, rows: Ints) -> Ints:
        return np.zeros_like(rows) if model in self.read else self.lags[rows]


def running(*remaining: int) -> Mapping[int, RequestView]:
    requests = {row: SimpleNamespace(remaining=left) for row, left in enumerate(remaining)}
    return cast(Mapping[int, RequestView], requests)


def cycle(reader: Reader, requests: int = 1, chunk: int = CHUNK) -> CycleCatchUp:
    return CycleCatchUp(chunk, cast(EngineView, reader), requests)


@given(st.lists(st.integers(0, 300), max_size=12), st.integers(0, 400))
def test_a_chunk_is_shared_by_the_shortest_first(wanted: list[int], chunk: int) -> None:
    want = np.array(wanted, dtype=np.int64)
    shares = share_shortest_first(want, chunk)
    assert shares.sum() == min(chunk, want.sum())
    assert ((shares >= 0) & (shares <= want)).all()
    if (unread := want[shares < want]).size:
        assert want[shares > 0].max(initial=0) <= unread.min()


def test_who_has_been_read_for_drafts_and_nobody_asks_what_it_costs() -> None:
    reader: Any = Reader(0, 2, CATCH_UP_TOKENS)
    del reader.performance
    unasked = cycle(reader, 3)
    found = unasked.drafting(PAIR, running(50, 50, 50), GAIN_MS)
    assert found == Drafting(able=frozenset({0, 1, 2}))


def test_a_row_drafts_in_the_cycle_that_reads_the_rest_of_its_text() -> None:
    found = cycle(Reader(0, 30, 300, 40)).drafting(PAIR, running(500, 500, 500, 500), GAIN_MS)
    assert found.able == {0, 1, 3}
    assert found.reads == {1, 2, 3}
    assert found.tokens == {"small": CHUNK}
    assert found.ms == pytest.approx(2.0)


def test_a_row_drafts_when_all_models_of_its_chain_have_read_it() -> None:
    found = cycle(Reader(150, read=("small",))).drafting(TRIPLE, running(500), GAIN_MS)
    assert not found.able
    assert found.tokens == {"small": 0, "middle": CHUNK}
    assert found.ms == pytest.approx(10.0)


@pytest.mark.parametrize(("left", "pays"), [(400, True), (331, True), (329, False), (10, False)])
def test_a_text_is_read_where_what_is_left_of_it_earns_that_back(left: int, pays: bool) -> None:
    # 300 chunks of 2 ms; 30 tokens at 20 ms must be drafted for, after 299 without.
    found = cycle(Reader(300 * CHUNK)).drafting(PAIR, running(left), GAIN_MS)
    assert bool(found.reads) == pays
    assert not found.able
    assert bool(found.ms) == pays


def test_a_text_that_is_asked_for_is_read_whatever_it_costs() -> None:
    found = cycle(Reader(300 * CHUNK), 32).drafting(PAIR, running(2))
    assert found.reads == {0}
    assert not cycle(Reader(300 * CHUNK)).drafting(PAIR, running(1)).reads, "its last token"


def test_all_requests_wait_for_what_is_read_for_one() -> None:
    def is_read(requests: int) -> bool:
        return bool(cycle(Reader(90), requests).drafting(PAIR, running(10), GAIN_MS).reads)

    assert is_read(99)  # 2 ms for each of them, against 200 ms
    assert not is_read(101)


def test_a_row_whose_turn_comes_too_late_is_not_read() -> None:
    found = cycle(Reader(1000, 1000, 1000)).drafting(PAIR, running(500, 500, 25), GAIN_MS)
    assert found.reads == {0, 1}
    alone = cycle(Reader(0, 0, 1000)).drafting(PAIR, running(500, 500, 25), GAIN_MS)
    assert alone.reads == {2}


def test_chains_share_what_a_model_may_read_in_a_cycle() -> None:
    both = cycle(Reader(60, 70))
    first = both.note(both.drafting(PAIR, {0: running(500)[0]}))
    second = both.note(both.drafting(TRIPLE, {1: running(500, 500)[1]}))
    assert (first.tokens, second.tokens) == ({"small": 60}, {"small": 40, "middle": 70})
    assert both.ms == pytest.approx(2.0 + 2.0 + 10.0)
    assert first.able == {0}
    assert not second.able


def test_rows_are_read_for_though_nobody_drafts_in_a_cycle() -> None:
    drafts, later = (
        Option(chain=PAIR, shape=DraftShape(4, 2)),
        Option(chain=PAIR, shape=DraftShape(3)),
    )
    alone = Option(chain=("big",))
    found = Drafting(able=frozenset({0, 1}), reads=frozenset({1, 2}))
    assert found.options(range(4), drafts, later, alone) == {
        **dict.fromkeys((0, 1, 2), drafts),
        3: alone,
    }
    assert found.options(range(4), alone, later, alone) == {0: alone, 1: alone, 2: later, 3: alone}


def test_rows_share_the_forwards_that_read_for_them() -> None:
    curves = snapshot({"small": rising(1.0, 0.5), "big": flat(9.0)}, machine=2.0)

    def read(*tokens: int) -> list[float]:
        catch_up, rows = cycle(Reader(*tokens, performance=curves)), np.arange(len(tokens))
        return [float(ms) for ms in catch_up.reading_ms("small", "big", rows, np.array(tokens))]

    whole = 2.0 * (1.0 + 99 * 0.5)
    assert read(0, 1) == pytest.approx([0.0, 2.0])
    assert read(10, 30) == pytest.approx([2 * (1.0 + 39 * 0.5) * share for share in (0.25, 0.75)])
    assert read(50, 50, 200) == pytest.approx([0.5 * whole, 0.5 * whole, 2 * whole])


def test_a_long_text_that_ends_soon_does_not_count_against_a_chain() -> None:
    both = cycle(Reader(2, 40, 1_000_000), 5)
    lags = {"small": float(1 + 39 + 999_999)}
    work = Workload(requests=5, lags=lags)
    found = both.payable(work, "big", running(50, 50, 10))
    assert found.lags == {"small": 1 + 39}
    assert (found.requests, found.others) == (4, 1), "it decodes beside"
    assert work.lags == lags
    other = replace(work, lags=lags | {"middle": 0.0})
    found = both.payable(other, "big", running(50, 50, 10))
    assert (found.requests, found.others) == (5, 0), "for another drafter it is read"


def test_what_is_only_considered_is_neither_read_nor_left_out() -> None:
    both = cycle(Reader(0, 10 * CHUNK))
    found = both.drafting(PAIR, running(500, 500))
    assert (both.ms, both.leaves_out) == (0.0, False)
    both.note(found)
    assert both.ms > 0.0
    assert both.leaves_out


def test_nothing_is_read_for_who_would_draft_at_once_where_nobody_drafts() -> None:
    both = cycle(Reader(25, 300))
    found = both.drafting(PAIR, running(500, 500))
    assert found.able_share == pytest.approx(0.25)
    both.note(found, drafts=False)
    assert both.ms == pytest.approx(0.75 * found.ms)
