"""Failures are drawn by a seed, and no replica fails while it is down."""

from itertools import pairwise

from research.sim.cluster.failures import drawn_failures


def test_a_seed_gives_one_list_by_time() -> None:
    found = drawn_failures(4, 600.0, 60.0, 12.0, seed=3)
    assert found == drawn_failures(4, 600.0, 60.0, 12.0, seed=3)
    assert found != drawn_failures(4, 600.0, 60.0, 12.0, seed=4)
    assert [one.at_s for one in found] == sorted(one.at_s for one in found)
    assert {one.kind for one in found} == {"killed", "hangs"}
    assert 20 <= len(found) <= 48, "one in 72 s of each, more or less"


def test_a_replica_fails_only_after_it_is_back() -> None:
    for replica in range(4):
        own = [one for one in drawn_failures(4, 600.0, 30.0, 12.0, 1) if one.replica == replica]
        assert all(a.back_s <= b.at_s for a, b in pairwise(own))
