"""Whether a replica attains an objective, by its own times: worked out by hand, and monotone."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrouter.cluster.admission import attainability
from specrouter.cluster.state import RoutedRequest
from specrouter.request.objective import Objective, Stage
from tests.specrouter.cluster.states import state


def request(objective: Objective | None = None, prompt: int = 100) -> RoutedRequest:
    return RoutedRequest(number=0, prompt_tokens=prompt, remaining=21, objective=objective)


def paced(tpot_ms: float) -> Objective:
    return Objective(tpot_ms=tpot_ms, ttft_ms=None)


def test_an_idle_replica_reads_the_prompt_and_decodes() -> None:
    found = attainability(state(), request())
    assert found.ttft_ms == pytest.approx(100 * 0.1 + 10.0)
    assert found.tpot_ms == pytest.approx(10.0)
    assert found.total_ms == pytest.approx(20.0 + 20 * 10.0)
    assert found.attained


def test_what_is_there_and_on_its_way_comes_first() -> None:
    own = state(running=1, unread_tokens=50)
    found = attainability(own, request(), sent=2, sent_tokens=150)
    assert found.tpot_ms == pytest.approx(13.0)
    assert found.ttft_ms == pytest.approx(300 * 0.1 + 13.0)


def test_without_a_row_it_waits_as_others_did() -> None:
    own = state(running=4, waiting=1, retry_after_s=3.0)
    assert attainability(own, request()).ttft_ms > 2000.0


def test_without_memory_it_waits_until_somebody_ends() -> None:
    """Three have 300 tokens each of 1,000; one ends in the time of 20 tokens, over three."""
    full = state(running=3, kv_reserved_tokens=900)
    found = attainability(full, request())
    alone_ms = 100 * 0.1 + 13.0
    assert found.ttft_ms == pytest.approx(13.0 * 21 / 3 + alone_ms)
    assert attainability(replace(full, kv_reserved_tokens=870), request()).ttft_ms < 30.0
    more = attainability(replace(full, waiting=1, rows=8), request())
    assert more.ttft_ms > found.ttft_ms, "who waits comes first"


@pytest.mark.parametrize(
    ("objective", "slack"),
    [
        (paced(20.0), 0.5),
        (paced(8.0), -0.25),
        (Objective(tpot_ms=None, ttft_ms=40.0), 0.5),
        (Objective(tpot_ms=20.0, ttft_ms=25.0), 0.2),
        (Objective(tpot_ms=None, ttft_ms=None, e2e_ms=440.0), 0.5),
        (
            Objective(
                tpot_ms=None, ttft_ms=None, stages=(Stage(40.0, until_tokens=4), Stage(12.5))
            ),
            0.2,
        ),
    ],
)
def test_the_tightest_part_of_an_objective_counts(objective: Objective, slack: float) -> None:
    found = attainability(state(), request(objective))
    assert found.slack == pytest.approx(slack)
    assert found.attained == (slack >= 0)
    assert bool(found.why) == (slack < 0)


def test_a_first_token_that_was_seen_is_asked_for_no_more() -> None:
    late = replace(request(Objective(tpot_ms=20.0, ttft_ms=5.0)), elapsed_ms=900.0)
    assert not attainability(state(), late).attained
    assert attainability(state(), replace(late, has_begun=True)).attained


def test_what_runs_was_promised_first() -> None:
    own = state(running=1, tightest_tpot_ms=10.5)
    found = attainability(own, request(paced(20.0)))
    assert not found.attained
    assert "promised to another" in found.why
    assert attainability(own, request()).attained, "it asks for nothing"


@given(st.integers(0, 8), st.integers(0, 8), st.integers(0, 500), st.integers(1, 500))
def test_more_work_before_a_request_never_makes_it_earlier(
    running: int, waiting: int, unread: int, prompt: int
) -> None:
    own = state(min(running, 4), waiting, unread_tokens=unread, retry_after_s=1.0)
    busier = replace(own, waiting=waiting + 1, unread_tokens=unread + 10)
    one, other = attainability(own, request(prompt=prompt)), attainability(busier, request())
    same = attainability(busier, request(prompt=prompt))
    assert same.ttft_ms >= one.ttft_ms or own.waiting > 0
    assert same.tpot_ms >= one.tpot_ms
    assert other.slack == one.slack, "nothing was asked"
