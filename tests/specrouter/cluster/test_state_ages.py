"""Ages of states are counted in buckets that tell whether 99% are within the aim."""

import pytest

from specrouter.cluster.state_ages import StateAges


def test_ages_are_counted_up_to_each_bound() -> None:
    ages = StateAges()
    assert ages.share_within(0.6) == 1.0
    ages.note([0.05, 0.1, 0.35, 0.6, 0.7, 9.0])
    assert ages.share_within(0.6) == 4 / 6
    [family] = [ages.metric()]
    by_bound = {s.labels["le"]: s.value for s in family.samples if s.name.endswith("_bucket")}
    assert by_bound["0.1"] == 2
    assert by_bound["0.6"] == 4
    assert by_bound["+Inf"] == 6
    assert next(s.value for s in family.samples if s.name.endswith("_sum")) == pytest.approx(10.8)
