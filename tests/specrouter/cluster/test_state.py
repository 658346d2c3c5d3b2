"""What a replica tells of its speed holds between the loads that it was told of."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.specrouter.cluster.states import state


@pytest.mark.parametrize(
    ("requests", "ms"), [(0, 10.0), (1, 10.0), (2, 11.0), (3, 12.0), (4, 13.0), (9, 13.0)]
)
def test_speed_is_linear_between_what_is_known(requests: int, ms: float) -> None:
    assert state().tpot_at(requests) == pytest.approx(ms)


@given(st.integers(0, 5000), st.integers(0, 1000))
def test_a_share_of_memory_is_at_most_all_of_it(reserved: int, capacity: int) -> None:
    own = state(kv_reserved_tokens=reserved, kv_capacity_tokens=capacity)
    assert 0.0 <= own.kv_share <= 1.0
