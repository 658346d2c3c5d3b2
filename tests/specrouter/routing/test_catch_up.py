"""Who is caught up, in what order, and where it cannot be earned back."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrouter.cycle import CATCH_UP_TOKENS, DraftShape, Option, share_shortest_first
from specrouter.profile.cycle_times import Workload
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.routing.catch_up import CycleCatchUp, Drafting
from specrouter.view import RequestTable
from tests.specrouter.predictions import PAIR, TRIPLE, flat, rising, snapshot
from tests.specrouter.views import request_view, table

CHUNK = 100
KNOWN = snapshot({"small": flat(2.0), "middle": flat(10.0), "big": rising(50.0)})
GAIN_MS = 20.0  # of each token that is drafted for


def running(
    *lags: int, remaining: int | Sequence[int] = 500, read: tuple[str, ...] = ()
) -> RequestTable:
    """Requests of which all models lack so many tokens, but those that have `read` all."""
    left = [remaining] * len(lags) if isinstance(remaining, int) else remaining
    return table(
        [
            request_view(
                place,
                row=place,
                remaining=tokens,
                slots=128,
                unread_by={name: 0 if name in read else lag for name in ("small", "middle")},
            )
            for place, (lag, tokens) in enumerate(zip(lags, left, strict=True))
        ]
    )


def cycle(
    requests: int = 1, chunk: int = CHUNK, performance: PerformanceSnapshot = KNOWN
) -> CycleCatchUp:
    return CycleCatchUp(chunk, performance, requests)


@given(st.lists(st.integers(0, 300), max_size=12), st.integers(0, 400))
def test_a_chunk_is_shared_by_the_shortest_first(wanted: list[int], chunk: int) -> None:
    want = np.array(wanted, dtype=np.int64)
    shares = share_shortest_first(want, chunk)
    assert shares.sum() == min(chunk, want.sum())
    assert ((shares >= 0) & (shares <= want)).all()
    if (unread := want[shares < want]).size:
        assert want[shares > 0].max(initial=0) <= unread.min()


def test_who_has_been_read_for_drafts_and_nobody_asks_what_it_costs() -> None:
    unasked = cycle(3, performance=cast(PerformanceSnapshot, None))
    found = unasked.drafting(PAIR, running(0, 2, CATCH_UP_TOKENS, remaining=50), GAIN_MS)
    assert found.able.tolist() == [True, True, True]
    assert not found.reads.any()


def test_a_row_drafts_in_the_cycle_that_reads_the_rest_of_its_text() -> None:
    found = cycle().drafting(PAIR, running(0, 30, 300, 40), GAIN_MS)
    assert found.able.tolist() == [True, True, False, True]
    assert found.reads.tolist() == [False, True, True, True]
    assert found.tokens == {"small": CHUNK}
    assert found.ms == pytest.approx(2.0)


def test_a_row_drafts_when_all_models_of_its_chain_have_read_it() -> None:
    found = cycle().drafting(TRIPLE, running(150, read=("small",)), GAIN_MS)
    assert not found.able.any()
    assert found.tokens == {"small": 0, "middle": CHUNK}
    assert found.ms == pytest.approx(10.0)


@pytest.mark.parametrize(("left", "pays"), [(400, True), (331, True), (329, False), (10, False)])
def test_a_text_is_read_where_what_is_left_of_it_earns_that_back(left: int, pays: bool) -> None:
    # 300 chunks of 2 ms; 30 tokens at 20 ms must be drafted for, after 299 without.
    found = cycle().drafting(PAIR, running(300 * CHUNK, remaining=left), GAIN_MS)
    assert bool(found.reads.any()) == pays
    assert not found.able.any()
    assert bool(found.ms) == pays


def test_a_text_that_is_asked_for_is_read_whatever_it_costs() -> None:
    found = cycle(32).drafting(PAIR, running(300 * CHUNK, remaining=2))
    assert found.reads.all()
    last = cycle().drafting(PAIR, running(300 * CHUNK, remaining=1))
    assert not last.reads.any(), "its last token"


def test_all_requests_wait_for_what_is_read_for_one() -> None:
    def is_read(requests: int) -> bool:
        return bool(cycle(requests).drafting(PAIR, running(90, remaining=10), GAIN_MS).reads.any())

    assert is_read(99)  # 2 ms for each of them, against 200 ms
    assert not is_read(101)


def test_a_row_whose_turn_comes_too_late_is_not_read() -> None:
    found = cycle().drafting(PAIR, running(1000, 1000, 1000, remaining=(500, 500, 25)), GAIN_MS)
    assert found.reads.tolist() == [True, True, False]
    alone = cycle().drafting(PAIR, running(0, 0, 1000, remaining=(500, 500, 25)), GAIN_MS)
    assert alone.reads.tolist() == [False, False, True]


def test_chains_share_what_a_model_may_read_in_a_cycle() -> None:
    both = cycle()
    first = both.note(both.drafting(PAIR, running(60)))
    second = both.note(both.drafting(TRIPLE, running(70)))
    assert (first.tokens, second.tokens) == ({"small": 60}, {"small": 40, "middle": 70})
    assert both.ms == pytest.approx(2.0 + 2.0 + 10.0)
    assert first.able.all()
    assert not second.able.any()


def test_rows_are_read_for_though_nobody_drafts_in_a_cycle() -> None:
    drafts, later = (
        Option(chain=PAIR, shape=DraftShape(4, 2)),
        Option(chain=PAIR, shape=DraftShape(3)),
    )
    alone = Option(chain=("big",))
    found = Drafting(
        able=np.array([True, True, False, False]), reads=np.array([False, True, True, False])
    )
    assert found.options(drafts, later, alone) == [drafts, drafts, drafts, alone]
    assert found.options(alone, later, alone) == [alone, alone, later, alone]


def test_rows_share_the_forwards_that_read_for_them() -> None:
    curves = snapshot({"small": rising(1.0, 0.5), "big": flat(9.0)}, machine=2.0)

    def read(*tokens: int) -> list[float]:
        catch_up, slots = cycle(performance=curves), np.full(len(tokens), 128)
        return [float(ms) for ms in catch_up.reading_ms("small", "big", slots, np.array(tokens))]

    whole = 2.0 * (1.0 + 99 * 0.5)
    assert read(0, 1) == pytest.approx([0.0, 2.0])
    assert read(10, 30) == pytest.approx([2 * (1.0 + 39 * 0.5) * share for share in (0.25, 0.75)])
    assert read(50, 50, 200) == pytest.approx([0.5 * whole, 0.5 * whole, 2 * whole])


def test_a_long_text_that_ends_soon_does_not_count_against_a_chain() -> None:
    both = cycle(5)
    requests = running(2, 40, 1_000_000, remaining=(50, 50, 10))
    lags = {"small": float(1 + 39 + 999_999)}
    work = Workload(requests=5, lags=lags)
    found = both.payable(work, "big", requests)
    assert found.lags == {"small": 1 + 39}
    assert (found.requests, found.others) == (4, 1), "it decodes beside"
    assert work.lags == lags
    other = replace(work, lags=lags | {"middle": 0.0})
    found = both.payable(other, "big", requests)
    assert (found.requests, found.others) == (5, 0), "for another drafter it is read"


def test_what_is_only_considered_is_neither_read_nor_left_out() -> None:
    both = cycle()
    found = both.drafting(PAIR, running(0, 10 * CHUNK))
    assert (both.ms, both.leaves_out) == (0.0, False)
    both.note(found)
    assert both.ms > 0.0
    assert both.leaves_out


def test_nothing_is_read_for_who_would_draft_at_once_where_nobody_drafts() -> None:
    both = cycle()
    found = both.drafting(PAIR, running(25, 300))
    assert found.able_share == pytest.approx(0.25)
    both.note(found, drafts=False)
    assert both.ms == pytest.approx(0.75 * found.ms)
