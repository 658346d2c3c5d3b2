"""What a replica tells is corrected by what was measured there."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrouter import SLO, ChainRouter, RouterConfig, SamplingParams
from specrouter.cluster.admission import attainability, expected_at
from specrouter.cluster.correction import (
    UNCORRECTED,
    Correction,
    Expected,
    Experience,
    corrections,
    measured_ms,
)
from specrouter.engine.request import Request
from specrouter.engine.serving import streamed
from specrouter.request.objective import Objective
from tests.specrouter.cluster.links import Cluster
from tests.specrouter.cluster.states import state, view
from tests.specrouter.cluster.test_admission import request
from tests.specrouter.faults import wait_until

TOLD = Expected(first_ms=100.0, tpot_ms=10.0)
EASY = SLO(tpot_ms=60_000.0)
TURNS = {"policy": "round-robin"}
RATIOS = st.lists(st.floats(0.1, 20.0), max_size=40)


def after(*ratios: float, **given: Any) -> Experience:
    """So many times as long as was told, both."""
    found, expected = Experience(), replace(TOLD, **{"is_promised": True, **given})
    for ratio in ratios:
        found = found.after(expected, 100.0 * ratio, 10.0 * ratio)
    return found


def test_one_that_takes_longer_than_it_tells_is_corrected_beside_the_others() -> None:
    known = {"a": after(*[1.5] * 8), "b": after(*[3.0] * 8), "c": after(*[4.5] * 8)}
    assert corrections(known) == {
        "a": Correction(1.0, 1.0),
        "b": Correction(2.0, 2.0),
        "c": Correction(3.0, 3.0),
    }


@given(RATIOS, st.floats(0.1, 20.0))
def test_what_all_take_longer_is_nobodys_correction(ratios: list[float], factor: float) -> None:
    one, slower = after(*ratios), after(*(factor * ratio for ratio in ratios))
    assert set(corrections({"a": one, "b": one}).values()) == {UNCORRECTED}
    assert corrections({"a": slower}) == {"a": UNCORRECTED}, "there is no other"


@given(st.lists(RATIOS, min_size=1, max_size=4))
def test_somebody_is_taken_at_its_word_and_nobody_is_made_faster(each: list[list[float]]) -> None:
    found = corrections({f"r{at}": after(*ratios) for at, ratios in enumerate(each)})
    for factors in zip(*((one.tpot, one.ttft) for one in found.values()), strict=True):
        assert min(factors) == 1.0


def test_a_replica_that_little_is_known_of_is_taken_at_its_word() -> None:
    """And tried, where the others take longer than they tell."""
    known = {"a": after(*[2.0] * 8), "b": Experience(), "c": after(*[9.0] * 3)}
    assert corrections(known) == {"a": Correction(2.0, 2.0), "b": UNCORRECTED, "c": UNCORRECTED}


def test_single_requests_that_are_out_of_line_count_for_little() -> None:
    usual = after(*[2.0] * 12, *[50.0] * 4)
    assert corrections({"a": after(*[1.0] * 8), "b": usual})["b"].tpot == 2.0


def test_what_is_long_ago_is_forgotten() -> None:
    assert after(*[5.0] * 20, *[1.2] * 16).factors == pytest.approx((1.2, 1.2))


def test_of_requests_without_a_promise_only_good_news_count() -> None:
    """They have to wait for the others."""
    assert after(*[3.0] * 8, is_promised=False) == Experience()
    found = after(*[3.0] * 8)
    for ratio in (5.0, 1.5, 7.0, 1.4, 1.3):
        found = found.after(TOLD, 100.0 * ratio, 10.0 * ratio)
    assert found.tpot == pytest.approx((*[3.0] * 8, 1.5, 1.4, 1.3))


def test_who_waited_for_a_row_says_nothing_of_the_first_token() -> None:
    assert after(*[4.0] * 8, wait_ms=50.0).factors == (4.0, 1.0)


def test_nothing_is_learned_where_nothing_was_expected() -> None:
    assert Experience().after(Expected(), 100.0, 10.0) == Experience()


def test_times_are_taken_from_when_tokens_came() -> None:
    came = [(10.2, 1), (10.25, 3), (10.5, 7)]
    found = measured_ms(10.0, came)
    assert found == pytest.approx((200.0, 30.0)), "ten tokens after the first, in 300 ms"
    assert measured_ms(10.0, came[:2])[1] is None, "too few"
    assert measured_ms(10.0, []) == (None, None)


def test_corrected_times_decide_what_is_attained() -> None:
    asked = request(Objective(tpot_ms=25.0, ttft_ms=40.0))
    told = attainability(state(), asked)
    assert (told.ttft_ms, told.tpot_ms) == pytest.approx((20.0, 10.0))
    found = attainability(state(), asked, correction=Correction(2.0, 1.5))
    assert (found.ttft_ms, found.tpot_ms) == pytest.approx((30.0, 20.0))
    assert found.slack == pytest.approx(0.2), "20 ms of 25"
    assert not attainability(state(), asked, correction=Correction(3.0)).attained
    assert not attainability(state(), asked, correction=Correction(ttft=2.1)).attained


def test_what_is_expected_is_what_the_view_says() -> None:
    asked = request(Objective(tpot_ms=25.0, ttft_ms=40.0))
    one = view("a", state(1, unread_tokens=50), sent=1, correction=Correction(2.0, 1.2))
    found = expected_at(one, asked)
    times_ms = found.wait_ms, found.first_ms, found.tpot_ms
    assert times_ms == pytest.approx((0.0, 150 * 0.1 + 12, 12.0))
    assert found.correction == one.correction
    assert found.is_promised
    assert not expected_at(view("b", correction=Correction(9.0)), asked).is_promised


def test_a_cluster_learns_of_each_replica_how_true_its_times_are(
    small_config: dict[str, Any],
) -> None:
    """One tells times that no machine has."""

    def make(name: str, config: RouterConfig) -> ChainRouter:
        router, told_ms = ChainRouter.from_config(config), {"a-0": 1e-6, "a-1": 1e3}[name]
        setattr(router.instruments, "predicted_tpot_ms", lambda requests: told_ms)  # noqa: B010
        return router

    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    asked = Request(prompt=(5, 17, 300), params=params, speculation=None, slo=EASY)

    async def served(cluster: Cluster) -> None:
        async with streamed(cluster.router, [asked] * 8) as deltas:
            async for _ in deltas:
                pass

    with Cluster(small_config, make, routing=TURNS) as cluster:
        asyncio.run(served(cluster))
        members = cluster.router._fleet.members
        wait_until(lambda: all(len(one.experience.tpot) == 4 for one in members.values()))
        known = {name: member.experience for name, member in members.items()}
        ready = cluster.router._fleet.ready(time.monotonic())
    assert {view.name: view.correction for view in ready} == corrections(known)
    assert corrections(known)["a-0"].tpot > 1e3
