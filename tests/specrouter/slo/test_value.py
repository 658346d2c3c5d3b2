"""What a cycle is worth: by hand, and what it promises for any requests."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrouter.slo.value import attainable, needed_rates, value

RATES = st.floats(0.001, 1.0)
TOKENS = st.floats(1.0, 16.0)
MS = st.floats(1.0, 500.0)


def rate(decode_ms: float, decoded: int, remaining: int, tpot_ms: float) -> float:
    arrays = (np.array([decode_ms]), np.array([decoded]), np.array([remaining]))
    return float(needed_rates(*arrays, np.array([tpot_ms]))[0])


def worth(tokens: float, needed: float, ms: float) -> float:
    return float(value(np.array([tokens]), np.array([needed]), np.array([ms]))[0])


def test_a_request_on_time_needs_its_objective_and_a_margin() -> None:
    assert rate(100.0, 10, 20, 10.0) == pytest.approx(1.2 / 10.0)


def test_what_was_lost_is_made_good_over_at_most_32_tokens() -> None:
    assert rate(260.0, 10, 32, 10.0) == pytest.approx(1.2 * 32 / 160)
    assert rate(260.0, 10, 500, 10.0) == rate(260.0, 10, 32, 10.0)
    assert rate(260.0, 10, 20, 10.0) > rate(260.0, 10, 32, 10.0), "less is left to make it good"


def test_without_an_objective_nothing_is_needed_and_past_the_deadline_nothing_suffices() -> None:
    assert rate(1e9, 1, 5, np.nan) == 0.0
    assert rate(1e9, 1, 5, 10.0) == np.inf


def test_who_needs_too_much_or_nobody_knows_what_of_is_not_helped() -> None:
    rates = np.array([0.0, 0.1, 0.5, np.inf])
    assert attainable(rates, np.array(0.1)).tolist() == [0.0, 0.1, 0.0, 0.0]
    for most in (np.nan, np.inf):  # what makes such numbers has failed: `value` is of numbers
        found = attainable(rates, np.array(most))
        assert np.isfinite(found).all()
        with np.errstate(invalid="raise"):
            value(np.array([1.0]), found, np.array([20.0]))


@given(tokens=TOKENS, more=st.floats(0.0, 8.0), needed=RATES, ms=MS)
def test_more_tokens_are_never_worth_less(
    tokens: float, more: float, needed: float, ms: float
) -> None:
    assert worth(tokens + more, needed, ms) >= worth(tokens, needed, ms) - 1e-12


@given(tokens=TOKENS, more=st.floats(0.0, 300.0), needed=RATES, ms=MS)
def test_a_longer_cycle_is_never_worth_more(
    tokens: float, more: float, needed: float, ms: float
) -> None:
    assert worth(tokens, needed, ms + more) <= worth(tokens, needed, ms) + 1e-12
