"""A pair is one choice; one half serves alone where the other cannot, or has no row left."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrouter import RouterConfig
from specrouter.cluster.flowguard import metrics_of
from specrouter.cluster.pairs import arranged, joined, reading
from specrouter.cluster.state import ReplicaView, RoutedRequest
from specrouter.request.objective import Objective
from tests.specrouter.cluster.states import state, view

PAIRS = {"p": ("p-prefill", "p-decode"), "q": ("q-r", "q-d")}
FULL = state(running=4)


def names(*views: ReplicaView) -> list[str]:
    return [one.name for one in arranged(views, PAIRS)[0]]


def test_pairs_are_those_of_the_configuration() -> None:
    pool = {"target": "t", "models": [{"name": "t", "source": "path:/none"}]}
    config = RouterConfig.load({"pool": pool, "cluster": {"pairs": [{"name": "p"}]}})
    assert config.cluster is not None
    assert [pair.halves for pair in config.cluster.pairs] == [PAIRS["p"]]
    assert list(config.replicas()) == ["p-prefill", "p-decode"]


def test_two_halves_are_one_choice_in_the_place_of_the_first() -> None:
    assert names(view("a"), view("p-prefill"), view("p-decode"), view("b")) == ["a", "p", "b"]


@pytest.mark.parametrize("alone", ["p-prefill", "p-decode"])
def test_a_half_without_the_other_one_serves_whole_requests(alone: str) -> None:
    assert names(view(alone), view("a")) == [alone, "a"]


def test_a_half_with_rows_serves_whole_requests_where_the_other_one_has_none() -> None:
    free, full = view("p-prefill"), view("p-decode", FULL)
    assert names(free, full) == ["p-prefill"]
    assert names(view("p-prefill", FULL), view("p-decode")) == ["p-decode"]
    assert arranged([free, full], PAIRS)[1] == {"p-decode": "has no row left, while p-prefill has"}


def test_two_full_halves_are_a_pair_and_what_is_on_its_way_counts() -> None:
    assert names(view("p-prefill", FULL), view("p-decode", FULL)) == ["p"]
    sent = view("p-prefill", state(running=3), sent=1)
    assert names(sent, view("p-decode")) == ["p-decode"]


_views = st.lists(
    st.sampled_from(["a", "p-prefill", "p-decode", "q-r", "q-d"]), unique=True, min_size=1
)


@given(of=_views, busy=st.sets(st.sampled_from(["p-prefill", "p-decode", "q-r", "q-d"])))
def test_whoever_can_be_chosen_has_a_way_to_requests(of: list[str], busy: set[str]) -> None:
    """But a half without a row, where the other one has one."""
    found, left_out = arranged([view(one, FULL if one in busy else None) for one in of], PAIRS)
    reached = list[str]()
    for one in found:
        reached += PAIRS.get(one.name, (one.name,))
    assert len(reached) == len(set(reached))
    assert set(reached) | set(left_out) == set(of)
    assert set(left_out) <= busy
    assert found


def test_a_pair_has_the_memory_of_decode_the_queue_of_prefill_and_the_rows_of_both() -> None:
    reads = state(1, 2, kv_reserved_tokens=900, unread_tokens=70, prefill_ms=0.3, rows=2)
    decodes = state(3, 1, kv_reserved_tokens=250, tpot_ms=((1, 7.0),), tightest_tpot_ms=9.0)
    one = joined("p", view("p-prefill", reads, sent=1, sent_tokens=40), view("p-decode", decodes))
    own = metrics_of(one.state, one.state.waiting, one.state.running, 0.0, 10)
    assert (one.name, one.sent, one.sent_tokens) == ("p", 1, 40)
    assert own.memory == 0.25
    assert own.queue == 0.2
    assert own.load == 4 / 6
    assert (one.state.unread_tokens, one.state.prefill_ms) == (70, 0.3)
    assert (one.state.tpot_at(1), one.state.tightest_tpot_ms) == (7.0, 9.0)


def test_the_half_that_reads_is_asked_for_a_first_token_only() -> None:
    whole = RoutedRequest(number=3, prompt_tokens=10, remaining=50)
    objective = Objective(tpot_ms=20.0, ttft_ms=500.0, e2e_ms=9000.0)
    asked = reading(replace(whole, objective=objective))
    assert asked == replace(whole, remaining=1, objective=Objective(tpot_ms=None, ttft_ms=500.0))
    paced = replace(whole, objective=Objective(tpot_ms=20.0, ttft_ms=None))
    assert reading(paced).objective is None
