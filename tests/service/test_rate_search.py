"""The search for a rate: it finds what is there, in as many probes as it may take."""

import math

from hypothesis import given
from hypothesis import strategies as st

from tests.service.rate_search import FEW, rate_of


@given(st.floats(0.3, 3.0), st.floats(0.2, 0.9), st.floats(2.0, 20.0))
def test_a_rate_is_found_to_a_quarter_within_four_probes(
    true: float, wanted: float, steepness: float
) -> None:
    probed = []

    def share_at(rate: float) -> float:
        """Falls through `wanted` at the true rate."""
        probed.append(rate)
        return 1.0 / (1.0 + (1.0 / wanted - 1.0) * (rate / true) ** steepness)

    found = rate_of(share_at, 1.0, wanted)
    assert abs(math.log(found / true)) < math.log(1.25)
    assert len(probed) == FEW


def test_where_all_attain_it_the_highest_rate_that_was_probed_is_taken() -> None:
    assert rate_of(lambda rate: 1.0, 2.0, 0.9, probes=3) == 2.0 * 1.5**2
    assert rate_of(lambda rate: 0.0, 2.0, 0.9, probes=3) == 2.0 / 1.5**2


def test_a_lucky_probe_above_one_that_fell_short_counts_for_nothing() -> None:
    shares = iter((0.4, 0.8, 0.9, 0.7, 0.3))
    assert rate_of(lambda rate: next(shares), 1.5, 0.5, probes=3) < 1.5
