"""Who would miss the objective where it is, and easily attain it elsewhere, moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrouter.cluster.endangered import SPARE, Course, Escape, escape, escaping
from specrouter.cluster.state import Ranking, RoutedRequest
from specrouter.request.objective import Objective
from tests.specrouter.cluster.states import state, view

TPOT = Objective(12.0, None)  # idle replicas of `state` give 10 ms, and 13 ms to each of four


def course(objective: Objective | None = TPOT, tokens: int = 10, **given: Any) -> Course:
    """Of 50 tokens, at 10 ms each so far."""
    decode_ms = given.pop("decode_ms", 10.0 * max(0, tokens - 1))
    usual: dict[str, Any] = {"elapsed_ms": 20.0 + decode_ms, "has_begun": bool(tokens)}
    request = RoutedRequest(0, 100 + tokens, 50 - tokens, objective, **{**usual, **given})
    return Course(request, tokens, decode_ms)


def test_who_is_in_time_stays() -> None:
    assert escape(course(), view("a", state(1)), [view("b")]) is None


def test_who_has_no_objective_stays() -> None:
    assert escape(course(None), view("a", state(4, 9)), [view("b")]) is None


def test_who_is_late_goes_where_it_will_be_in_time() -> None:
    """Of 49 tokens at 12 ms, 9 took 10 and the others would take 13."""
    crowded = view("a", state(4))
    roomy = state(tpot_ms=((1, 8.0), (2, 8.0), (4, 9.0)))
    found = escape(course(), crowded, [view("c", state(3)), view("b", roomy)])
    assert found is not None
    assert found.replica == "b"
    assert found.slack_here == pytest.approx(1 - (90 + 40 * 13) / (49 * 12))
    took_ms = 90 + 110 * 0.1 + 8 + 39 * 8
    assert found.slack == pytest.approx(1 - took_ms / (49 * 12))
    assert "b" in found.why


def test_who_is_lost_anyway_stays() -> None:
    late = course(decode_ms=5000.0)
    assert escape(late, view("a", state(4)), [view("b")]) is None


def test_a_small_gain_moves_nobody() -> None:
    other = view("b", state(1))
    found = escape(course(Objective(11.5, None)), view("a", state(4)), [other])
    assert found is None, "11 ms leave less than a fifth of 11.5"


def test_nobody_goes_where_others_would_miss_theirs() -> None:
    promised = state(1, tpot_ms=((1, 5.0), (2, 6.0)), tightest_tpot_ms=5.5)
    assert escape(course(), view("a", state(4)), [view("b", promised)]) is None
    free = replace(promised, tightest_tpot_ms=None)
    assert escape(course(), view("a", state(4)), [view("b", free)]) is not None


def test_those_that_have_left_make_room() -> None:
    """So not all of a crowded replica's requests leave it at once."""
    other = view("b", state(tpot_ms=((1, 5.0), (4, 6.0))))
    crowded = view("a", state(4))
    assert escape(course(), crowded, [other], left=0) is not None
    assert escape(course(), crowded, [other], left=2) is None


def test_what_is_on_its_way_there_counts() -> None:
    roomy = state(tpot_ms=((1, 8.0), (2, 9.0), (4, 20.0)))
    here = view("a", state(4))
    assert escape(course(), here, [view("b", roomy)]) is not None
    assert escape(course(), here, [view("b", roomy, sent=3, sent_tokens=900)]) is None


def test_a_first_token_in_danger_is_read_elsewhere() -> None:
    asked = Objective(None, 100.0)
    waits = course(asked, 0, elapsed_ms=30.0)
    long = view("a", state(2, unread_tokens=2000))
    assert escape(waits, view("a", state(2, unread_tokens=100)), [view("b")]) is None
    found = escape(waits, long, [view("b")])
    assert found is not None
    assert found.slack == pytest.approx(1 - (30 + 10 + 10) / 100)
    seen = course(asked, 5)
    assert escape(seen, long, [view("b")]) is None, "it has come"


def test_a_latency_counts_what_is_read_again() -> None:
    asked = Objective(None, None, e2e_ms=600.0)
    roomy = state(tpot_ms=((1, 5.0), (4, 6.0)))
    found = escape(course(asked), view("a", state(4, 2, rows=4)), [view("b", roomy)])
    assert found is not None
    assert found.slack == pytest.approx(1 - (110 + 110 * 0.1 + 5 + 39 * 5) / 600)


def test_the_place_is_asked_first_with_the_reason() -> None:
    ranking = Ranking(("a", "b", "c"), {}, "its turn", {}, asks=True)
    found = escaping(ranking, Escape("c", 0.3, -0.2))
    assert found.order == ("c", "a", "b")
    assert "20%" in found.reason
    assert escaping(ranking, Escape("gone", 0.3, -0.2)) == ranking
    assert escaping(ranking, None) == ranking


LOADS = st.tuples(st.integers(0, 4), st.integers(0, 8), st.integers(0, 4000), st.integers(0, 3))


@given(
    st.lists(LOADS, min_size=2, max_size=5),
    st.integers(0, 49),
    st.floats(0, 3000),
    st.sampled_from([TPOT, Objective(30.0, 200.0), Objective(None, None, e2e_ms=900.0)]),
)
def test_who_moved_does_not_move_back(
    loads: list[tuple[int, int, int, int]], tokens: int, decode_ms: float, asked: Objective
) -> None:
    """Right after a move, by the same states with the request counted where it went."""
    views = [
        view(f"r{at}", state(running, waiting, unread_tokens=unread), sent=sent)
        for at, (running, waiting, unread, sent) in enumerate(loads)
    ]
    own = course(asked, tokens, decode_ms=decode_ms if tokens else 0.0)
    found = escape(own, views[0], views[1:])
    if found is None:
        return
    assert found.slack >= SPARE
    assert found.slack_here < 0
    there = next(one for one in views if one.name == found.replica)
    prompt = there.sent_tokens + own.request.prompt_tokens
    there = replace(there, sent=there.sent + 1, sent_tokens=prompt)
    others = [one for one in views if one.name != found.replica]
    back = escape(own, there, others)
    assert back is None or back.replica != "r0"
