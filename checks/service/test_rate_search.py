"""The search for a rate: it finds what is there, in as many probes as it may take."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.service.rate_search import rate_of


@given(st.floats(0.3, 3.0), st.floats(0.2, 0.9), st.floats(2.0, 20.0))
def test_a_rate_is_found_to_a_quarter_within_few_probes(
    true: float, wanted: float, steepness: float
) -> None:
    probed = []

    def share_at(rate: float) -> float:
        """Falls through `wanted` at the true rate."""
        probed.append(rate)
        return float(1.0 / (1.0 + (1.0 / wanted - 1.0) * (rate / true) ** steepness))

    found = rate_of(share_at, 1.0, wanted)
    assert abs(math.log(found / true)) < math.log(1.25)
    assert 3 <= len(probed) <= 5


def test_where_one_side_is_never_seen_the_outermost_rate_is_taken() -> None:
    assert rate_of(lambda rate: 1.0, 2.0, 0.9) == 2.0 * 1.5**4
    assert rate_of(lambda rate: 0.0, 2.0, 0.9) == pytest.approx(2.0 / 1.5**4)


def test_a_lucky_probe_above_one_that_fell_short_counts_for_nothing() -> None:
    shares = iter((0.4, 0.6, 0.45))
    found = rate_of(lambda rate: next(shares), 1.5, 0.5)
    assert 1.0 < found < math.sqrt(1.5)
