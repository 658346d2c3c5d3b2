"""What is left for prompts beside requests that decode: against the paper's algorithm and table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from research.policies.autoregressive import AutoregressiveBudget
from research.policies.prefill_budget import SpeculativeBudget
from research.sim.roofline import RooflineTime
from specrouter.slo.serve.pacing import accepted
from tests.specrouter.slo_machines import OPT_7B

TIERS = (50.0, 100.0)


def algorithm_2(span_ms: float, tpots_ms: Sequence[float], tokens: int) -> float:
    """As printed, but for the comparison: a token is due at `schDDL <= i * t0`."""
    batch_ms = min(tpots_ms)
    due, left = [0.0] * len(tpots_ms), 0.0
    for batch in range(int(span_ms / batch_ms + 1e-9)):
        budget = tokens
        for each, tpot_ms in enumerate(tpots_ms):
            while due[each] <= batch * batch_ms:
                budget -= 1
                due[each] += tpot_ms
        left += budget
    return left


@given(st.integers(0, 6), st.integers(1, 6), st.integers(1, 4), st.integers(0, 40))
def test_it_is_the_sum_of_algorithm_2_where_tpots_are_multiples(
    tight: int, loose: int, times: int, batches: int
) -> None:
    machine = RooflineTime(((0.2, 0.0, 5.0),))
    tiers = (10.0, 10.0 * times) if times > 1 else (10.0,)
    counts = np.array([tight, loose][: len(tiers)])
    if not counts.sum():
        return
    tpots = [tpot for tpot, n in zip(tiers, counts, strict=True) for _ in range(n)]
    span = batches * 10.0 + 3.0
    found = AutoregressiveBudget(machine, tiers, 100.0).over(np.array(span), counts)
    tokens = machine.tokens_within(min(tpots))
    assert float(found) == algorithm_2(span, tpots, tokens)


def test_batches_are_as_long_as_the_tightest_tier_that_decodes_allows() -> None:
    budget = AutoregressiveBudget(OPT_7B, TIERS, 100.0)
    span = np.array(200.0)
    assert budget.over(span, np.array([0, 0])) == 2 * 1093
    assert budget.over(span, np.array([0, 10])) == 2 * 1093 - 2 * 10
    assert budget.over(span, np.array([1, 10])) == 4 * 366 - 4 - 2 * 10
    capped = AutoregressiveBudget(OPT_7B, TIERS, 100.0, most_ms=50.0)
    assert capped.over(span, np.array([0, 10])) == 4 * 366 - 2 * 10


# The table of published coefficients: OPT-6.7B, alpha 0.7, TPOT 50 ms, 20 requests decode.
TABLE_MS = (50, 85, 110, 127, 139, 147)
# Thousands of prompt tokens per second. The paper drafts one step more, for the root: 10.9 at 4.
READ_PER_MS = (6.9, 9.8, 10.7, 11.1, 10.9, 10.6)


def test_more_requests_than_fit_into_a_batch_cannot_decode() -> None:
    budget = AutoregressiveBudget(OPT_7B, (*TIERS, np.inf), 100.0)
    assert budget.holds(np.array([[1, 365, 900], [1, 366, 0], [0, 1093, 0]])).tolist() == [
        True,
        False,
        True,
    ]
    assert np.isinf(budget.over(np.array(10.0), np.array([1, 366, 0])))
    assert budget.over(np.array(100.0), np.array([0, 0, 5000])) == 1093, "no objective, no claim"


def test_speculation_reads_as_much_as_the_table_of_lengths_says() -> None:
    budget = SpeculativeBudget(times=OPT_7B, tiers_ms=(50.0,), alpha=0.7, idle_ms=50.0)
    counts = np.array([20])
    lengths, ms, tokens = budget._candidates((True,))
    of = dict(zip(lengths[:, 0].tolist(), zip(ms, tokens, strict=True), strict=True))
    found = [(of[s][1] - 20 * s) / of[s][0] for s in range(1, 7)]
    assert [round(each, 1) for each in found] == list(READ_PER_MS)
    assert [round(of[s][0]) for s in range(1, 7)] == list(TABLE_MS)
    assert budget.best(counts).lengths == (4,)


def test_each_tier_verifies_no_more_than_its_pace_needs() -> None:
    budget = SpeculativeBudget(times=OPT_7B, tiers_ms=TIERS, alpha=0.7, idle_ms=100.0)
    best = budget.best(np.array([10, 10]))
    tight, loose = best.lengths
    reach = accepted(0.7, np.arange(11))
    assert best.ms == pytest.approx(min(50.0 * reach[tight], 100.0 * reach[loose]))
    assert 100.0 * reach[loose - 1] < best.ms, "one token less would be too slow"
    assert budget.best(np.array([0, 10])).lengths[0] == 0
    assert budget.best(np.array([0, 0])).ms == 100.0


@given(st.integers(0, 30), st.integers(0, 30), st.floats(0.0, 0.99), st.floats(0.0, 0.3))
def test_speculation_keeps_every_pace_in_the_mean_and_never_reads_less_than_without(
    tight: int, loose: int, alpha: float, margin: float
) -> None:
    counts = np.array([tight, loose])
    budget = SpeculativeBudget(
        times=OPT_7B, tiers_ms=TIERS, alpha=alpha, idle_ms=100.0, margin=margin
    )
    best = budget.best(counts)
    for length, tpot_ms, n in zip(best.lengths, TIERS, counts, strict=True):
        reach = accepted(alpha, np.array(length))
        assert not n or best.ms <= tpot_ms * (1.0 - margin) * reach * (1.0 + 1e-9)
    assert OPT_7B.ms(best.tokens, max(0, max(best.lengths) - 1)) <= best.ms
    span = np.array(best.ms)
    assert budget.over(span, counts) == best.tokens - counts @ best.lengths
    if tight + loose:
        shortest = 50.0 * (1.0 - margin) if tight else 100.0 * (1.0 - margin)
        plain = OPT_7B.tokens_within(shortest) - tight - loose
        assert float(budget.over(span, counts)) / best.ms >= plain / shortest - 1e-9
