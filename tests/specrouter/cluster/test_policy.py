"""Each policy ranks every replica that it does not exclude, once, and says by which terms."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import research.policies  # noqa: F401 (registers the published one)
from specrouter.cluster.correction import Correction
from specrouter.cluster.policy import RoutingSettings, rank
from specrouter.cluster.state import Ranking, ReplicaView, RoutedRequest
from specrouter.config.policies import REPLICA_POLICIES
from specrouter.request.objective import Objective
from tests.specrouter.cluster.states import state, view

SETTINGS = RoutingSettings(longest_queue=16)
POLICIES = REPLICA_POLICIES.names
LOADS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 20), st.integers(0, 3), st.integers(0, 1000)),
    min_size=1,
    max_size=6,
)
OBJECTIVES = st.sampled_from(
    [None, Objective(tpot_ms=12.0, ttft_ms=None), Objective(tpot_ms=1.0, ttft_ms=1.0)]
)


def ranked(policy: str, views: list[ReplicaView], number: int = 0, **given: Any) -> Ranking:
    return rank(
        policy,
        RoutedRequest(number=number, prompt_tokens=100, remaining=20, **given),
        views,
        SETTINGS,
    )


@pytest.mark.parametrize("policy", POLICIES)
@given(loads=LOADS, number=st.integers(0, 100), objective=OBJECTIVES, dice=st.tuples(
    st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)
))  # fmt: skip
def test_every_replica_is_ranked_once_or_excluded_with_a_reason(
    policy: str,
    loads: list[tuple[int, int, int, int]],
    number: int,
    objective: Objective | None,
    dice: tuple[float, float],
) -> None:
    views = [
        view(f"r{at}", state(running, waiting, kv_reserved_tokens=kv), sent=sent)
        for at, (running, waiting, sent, kv) in enumerate(loads)
    ]
    found = ranked(policy, views, number, objective=objective, dice=dice)
    assert found.order, "somebody serves it"
    assert sorted((*found.order, *found.excluded)) == [one.name for one in views]
    assert set(found.terms) == {one.name for one in views}
    assert found.reason
    again = ranked(policy, views, number, objective=objective, dice=dice)
    assert again == found, "the same view, the same decision"


def test_round_robin_takes_turns() -> None:
    views = [view("a"), view("b"), view("c")]
    assert [ranked("round-robin", views, n).order[0] for n in range(4)] == ["a", "b", "c", "a"]


def test_the_shortest_counts_what_is_on_its_way() -> None:
    views = [view("a", state(1), sent=2), view("b", state(2))]
    assert ranked("join-shortest", views).order == ("b", "a")


def test_two_choices_take_the_better_of_two() -> None:
    views = [view("a", state(3)), view("b", state(2)), view("c", state(0))]
    first = ranked("p2c", views, dice=(0.0, 0.0)).order
    assert first == ("b", "a", "c"), "c was not drawn"
    assert ranked("p2c", views, dice=(0.9, 0.0)).order[0] == "c"


def burst(policy: str) -> dict[str, int]:
    """Of 8 requests at once, where two idle replicas told their states before."""
    sent, old = {"a": 0, "b": 0}, state()
    for number in range(8):
        views = [view(name, old, sent=count) for name, count in sent.items()]
        sent[ranked(policy, views, number).order[0]] += 1
    return sent


def test_flowguard_sees_what_was_sent() -> None:
    """Metrics of 500 ms ago would send all to one."""
    assert burst("flowguard") == {"a": 4, "b": 4}


def test_flowguard_counts_cache_hits_of_the_request() -> None:
    views = [view("a"), view("b", state(2), matched_tokens=100)]
    found = ranked("flowguard", views)
    assert found.order == ("b", "a")
    assert found.terms["b"]["C"] == 1.0


def test_overloaded_replicas_are_left_out_with_their_figure() -> None:
    views = [view("a", state(4, 7)), view("b", state(4, 1))]
    found = ranked("flowguard", views)
    assert found.order == ("b",)
    assert found.excluded == {"a": "overloaded: 0.88 > 0.85"}


def test_slo_takes_turns_among_those_that_attain_the_objective() -> None:
    slow = state(tpot_ms=((1, 40.0),))
    views = [view("a"), view("b", slow), view("c")]
    asked = Objective(tpot_ms=20.0, ttft_ms=None)
    orders = [ranked("slo", views, n, objective=asked).order for n in range(2)]
    assert orders == [("a", "c", "b"), ("c", "a", "b")]
    assert ranked("slo", views, objective=asked).asks


def test_slo_says_what_is_lacking_where_none_attains_the_objective() -> None:
    views = [view("a", state(4)), view("b")]
    found = ranked("slo", views, objective=Objective(tpot_ms=5.0, ttft_ms=None))
    assert found.order == ("b", "a"), "who is done first"
    assert found.reason.startswith("none attains it: a: a TPOT of 13 ms where 5 ms are asked")


def test_who_attains_nowhere_goes_where_it_is_done_first() -> None:
    """The slow one, which is idle, would begin sooner and end later."""
    slow, busy = state(tpot_ms=((1, 40.0),)), state(3, unread_tokens=400)
    views = [view("a", slow), view("b", busy)]
    found = ranked("slo", views, objective=Objective(tpot_ms=5.0, ttft_ms=None))
    assert found.terms["a"]["ttft_ms"] < found.terms["b"]["ttft_ms"]
    assert found.order == ("b", "a")


def test_slo_takes_replicas_as_they_were_measured() -> None:
    views = [view("a", correction=Correction(tpot=3.0)), view("b", state(2))]
    found = ranked("slo", views, objective=Objective(tpot_ms=20.0, ttft_ms=None))
    assert found.order == ("b", "a"), "30 ms in the place of 10"
    assert found.terms["a"]["tpot_ms"] == pytest.approx(30.0)
    assert found.terms["a"]["tpot_factor"] == 3.0


def test_without_an_objective_slo_takes_who_is_done_first() -> None:
    slow = state(tpot_ms=((1, 40.0),))
    busy = state(3)
    assert ranked("slo", [view("a", slow), view("b", busy)]).order == ("b", "a")


def test_slo_counts_what_a_replica_has_read_before() -> None:
    views = [view("a"), view("b", state(1), matched_tokens=97)]
    found = ranked("slo", views)
    assert found.terms["a"]["ttft_ms"] == pytest.approx(100 * 0.1 + 10.0)
    assert found.terms["b"]["ttft_ms"] == pytest.approx(3 * 0.1 + 11.0)


def test_those_that_leave_about_as_much_of_an_objective_take_turns() -> None:
    asked = Objective(tpot_ms=40.0, ttft_ms=None)
    speeds_ms = {"a": 10.0, "b": 13.0, "c": 20.0}
    views = [view(name, state(tpot_ms=((1, ms),))) for name, ms in speeds_ms.items()]
    found = [ranked("slo", views, number, objective=asked).order for number in range(3)]
    assert [order[0] for order in found] == ["a", "b", "a"], "0.75 and 0.675 are as good"
    assert {order[2] for order in found} == {"c"}, "0.5 is not, and is attained all the same"


@pytest.mark.parametrize(("name", "why"), [("FAILING", "no weights"), ("ELSEWHERE", "nowhere")])
def test_a_policy_that_fails_costs_no_request(name: str, why: str) -> None:
    views = [view("a", state(running=3)), view("b", state(running=1))]
    found = ranked(f"tests.specrouter.own_replica_policy:{name}", views)
    assert found.order == ("b", "a")
    assert why in found.reason
