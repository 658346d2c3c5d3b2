"""A simulated pair: the first token is the prefill half's, the rest the decode half's."""

from __future__ import annotations

from itertools import pairwise

import pytest

from research.sim.cluster.pair import SimulatedPair
from research.sim.cluster.replica import Served
from research.tests.sim.cluster.test_cluster import MACHINE, pair, plain


def ran(one: SimulatedPair, *served: Served) -> None:
    while not all(each.is_done for each in served):
        now_s = one.next_s
        assert now_s is not None, "it goes on"
        one.run_until(now_s)
        one.go_on(now_s)


def test_keys_and_values_travel_and_nothing_is_read_twice() -> None:
    one = pair(kv_ms=2.0)
    served = one.receive(plain(300, 12, seed=1), 0.0, [])
    ran(one, served)
    assert MACHINE.batch is not None
    [first, *others] = served.sent.commits
    assert first[0] == pytest.approx(MACHINE.batch.ms(300) / 1000)
    assert first[1] == 1
    gap_s = others[0][0] - first[0]
    token_s = MACHINE.batch.ms(1) / 1000
    assert gap_s == pytest.approx(300 * 0.002 + token_s), "the transfer, and a token"
    assert all(b[0] - a[0] == pytest.approx(token_s) for a, b in pairwise(others))
    assert sum(count for _, count in served.sent.commits) == 12


def test_a_prompt_does_not_slow_who_decodes() -> None:
    one = pair(kv_ms=0.0)
    early = one.receive(plain(10, 40, seed=1), 0.0, [])
    late = one.receive(plain(2000, 4, seed=2), 0.0, [])
    ran(one, early, late)
    assert MACHINE.batch is not None
    gaps_s = [b[0] - a[0] for a, b in pairwise(early.sent.commits[1:])]
    assert max(gaps_s) < 1.1 * MACHINE.batch.ms(2) / 1000


def test_one_token_needs_no_second_half() -> None:
    one = pair()
    served = one.receive(plain(30, 1, seed=1), 0.0, [])
    ran(one, served)
    assert one.decode.state().requests == 0
    assert served.sent.answer().tokens == 1


def test_who_reads_or_travels_waits_and_is_counted() -> None:
    one = pair(kv_ms=50.0)
    served = one.receive(plain(30, 5, seed=1), 0.0, [])
    assert (one.state().waiting, one.state().unread_tokens) == (1, 30)
    while one.next_s is not None and one.next_s < 1.0:
        now_s = one.next_s
        one.run_until(now_s)
        one.go_on(now_s)
    assert not served.is_done, "the transfer takes 1.5 s"
    assert one.state().requests == 1


def test_who_lost_another_pair_is_read_with_what_came() -> None:
    one = pair()
    served = one.receive(plain(30, 12, seed=1), 0.0, [(0.0, 4), (0.01, 3)])
    ran(one, served)
    assert served.sent.commits[:2] == [(0.0, 4), (0.01, 3)]
    assert sum(count for _, count in served.sent.commits) == 12
